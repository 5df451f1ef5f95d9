"""Images, video and audio in a prompt: items of one size each, as patches to encode and as tokens of the prompt.

    patches = ceil(w / (p m)) ceil(h / (p m)) m^2,      tokens = kept patches / m^2

for w x h pixels, patches of p pixels, merged m x m by the projector (a tower of fixed input size scales every image to
it). Video is items of as many frames as the encoder takes together, audio is windows of 30 s. A resampler with a fixed
number of queries sets the tokens of an item instead.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from breakeven.models.architecture import Encoder
from breakeven.models.distributions import Constant, Distribution, Floats, Scaled, distribution
from breakeven.models.inputs import InputError, number

AUDIO_WINDOW_S, AUDIO_PATCHES_PER_S = 30.0, 50.0  # Whisper's encoder, arXiv:2212.04356: 1,500 positions for 30 s
DEFAULTS: dict[str, Any] = {
    "images_per_call": 0,
    "image_size": None,
    "tokens_per_image": None,
    "patches_per_image": None,
    "visual_tokens_kept": 1,
    "image_reuse": 0,
    "video_s_per_call": 0,
    "video_frames_per_s": 2,
    "audio_s_per_call": 0,
    "audio_tokens_per_s": 25,
}
FIELDS = tuple(DEFAULTS)
_COUNTS = ("images_per_call", "video_s_per_call", "audio_s_per_call")


@dataclass(frozen=True)
class Media:
    """What a call brings beside text. `patches` and `tokens` of an item are None until a model's encoder says."""

    items: Distribution  # per call: images, groups of frames, windows of audio
    size: tuple[float, float] | None  # pixels
    patches: float | None
    tokens: float | None
    kept: float  # share of the visual tokens that merging or dropping leaves
    reuse: float  # share of the items that were encoded before, and whose features an engine still holds
    video: bool

    def counts(self, calls: int, rng: np.random.Generator) -> Floats:
        """Items of each call; of a broken number the next lower or higher one, at random."""
        drawn = self.items.sample(rng, calls)
        return np.floor(drawn) if isinstance(self.items, Constant) and drawn[0] % 1.0 == 0.0 else _whole(drawn, rng)


def _whole(values: Floats, rng: np.random.Generator) -> Floats:
    return np.floor(values + rng.random(len(values)))


def media(values: Mapping[str, Any], field: str) -> Media | None:
    """The media of a workload's fields (any of `FIELDS`); None where calls are text alone. Raises InputError."""
    given = {**DEFAULTS, **{key: value for key, value in values.items() if key in DEFAULTS}}
    counts = {key: distribution(given[key], f"{field}.{key}", 0.0, 1e5) for key in _COUNTS}
    named = [key for key, count in counts.items() if count.mean() > 0.0]
    if not named:
        return None
    if len(named) > 1:
        raise InputError(f"{field}.{named[1]}", given[named[1]], f"one kind of media: {named[0]} is given, too")
    optional = {key: _optional(f"{field}.{key}", given[key]) for key in ("tokens_per_image", "patches_per_image")}
    found = Media(
        items=counts[named[0]],
        size=_size(given["image_size"], f"{field}.image_size"),
        patches=optional["patches_per_image"],
        tokens=optional["tokens_per_image"],
        kept=number(f"{field}.visual_tokens_kept", given["visual_tokens_kept"], 1e-3, 1.0),
        reuse=number(f"{field}.image_reuse", given["image_reuse"], 0.0, 1.0),
        video=named[0] == "video_s_per_call",
    )
    if found.video:
        frames = number(f"{field}.video_frames_per_s", given["video_frames_per_s"], 1e-3, 1e3)
        return dataclasses.replace(found, items=Scaled(found.items, frames))
    if named[0] == "audio_s_per_call":
        rate = number(f"{field}.audio_tokens_per_s", given["audio_tokens_per_s"], 0.0, 1e3)
        return dataclasses.replace(
            found,
            items=Scaled(found.items, 1.0 / AUDIO_WINDOW_S),
            patches=found.patches or AUDIO_WINDOW_S * AUDIO_PATCHES_PER_S,
            tokens=AUDIO_WINDOW_S * rate if found.tokens is None else found.tokens,
        )
    return found


def _optional(field: str, value: object) -> float | None:
    return None if value is None else number(field, value, 0.0, 1e6)


def _size(value: object, field: str) -> tuple[float, float] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise InputError(field, value, "[width, height] in pixels")
    return number(field, value[0], 1.0, 1e5), number(field, value[1], 1.0, 1e5)


def seen_by(media: Media, encoder: Encoder | None, field: str = "workload") -> Media:
    """The media as a model with this encoder sees them: patches and tokens of an item are known.

    A model without an encoder takes the tokens it is given and encodes nothing.
    """
    if encoder is None:
        if media.tokens is None:
            raise InputError(f"{field}.tokens_per_image", None, "is required: the model has no vision encoder")
        return dataclasses.replace(media, patches=0.0)
    merged = encoder.merge**2
    patches = media.patches
    if patches is None and media.size is not None:
        patches = encoder.patches(*media.size)
    if patches is None and media.tokens is not None:
        patches = media.tokens * merged
    if patches is None:
        raise InputError(f"{field}.image_size", None, "is required, or tokens_per_image")
    tokens = patches / merged * media.kept if media.tokens is None else media.tokens
    items = Scaled(media.items, 1.0 / encoder.temporal_patch) if media.video else media.items
    return dataclasses.replace(media, patches=patches, tokens=tokens, items=items)
