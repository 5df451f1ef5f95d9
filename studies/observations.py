"""Points that users measured on one deployment of their own: a table of them, and the model's times beside."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from breakeven.models.inputs import InputError, known_fields, number
from breakeven.models.local import Correction
from breakeven.models.sessions import session_spec
from breakeven.models.workload import Workload, workload
from breakeven.studies.benchmark import MAX_CONTEXT, SAMPLES, Inputs, predict_jitted, stacked, uncorrected
from breakeven.studies.deployment_file import Deployed
from breakeven.studies.kernel_logs import step_s
from breakeven.studies.local_calibration import Floats, Times

PROFILE = ("profile", "profile_steps", "profile_ranks")  # in place of tpot_ms: kernels of some decode steps
COLUMNS = ("concurrency", "requests_per_second", "input_tokens", "output_tokens", "requests", "ttft_ms", "tpot_ms")


@dataclass(frozen=True)
class Observation:
    """Means of one load that was measured; nan where nothing is said.

    TPOT is a request's time after its first token over its further tokens. Either a closed loop of `concurrency`, or
    requests that come at a rate. Without lengths they are those of the deployment's own workload. Of a closed loop of
    a stated number of requests the first wave came at once.
    """

    ttft_ms: float
    tpot_ms: float
    concurrency: float = math.nan
    requests_per_second: float = math.nan
    input_tokens: float = math.nan
    output_tokens: float = math.nan
    requests: float = math.nan
    file: str = ""

    @property
    def closed(self) -> bool:
        """Whether the number of requests in flight is held, not their rate."""
        return math.isfinite(self.concurrency)

    def words(self) -> str:
        """Its load and lengths in words."""
        load = f"concurrency {self.concurrency:g}" if self.closed else f"{self.requests_per_second:g} requests/s"
        lengths = f", {self.input_tokens:.0f} + {self.output_tokens:.0f} tokens" if self.input_tokens > 0.0 else ""
        return load + lengths


def checked(given: dict[str, Any], file: str, where: str = "") -> Observation:
    """An observation from fields by name; InputError for the first that is wrong."""
    prefix = f"{where}." if where else ""
    known_fields(given, COLUMNS, where)
    values = {}
    for name in COLUMNS:
        value = given.get(name)
        missing = value is None or value == "" or (isinstance(value, float) and math.isnan(value))
        values[name] = math.nan if missing else number(f"{prefix}{name}", _plain(value), 1e-9, 1e12)
    found = Observation(**values, file=file)
    if math.isfinite(found.concurrency) == math.isfinite(found.requests_per_second):
        raise InputError(f"{prefix}concurrency", given.get("concurrency"), "exactly one of it and requests_per_second")
    if math.isfinite(found.input_tokens) != math.isfinite(found.output_tokens):
        raise InputError(f"{prefix}input_tokens", given.get("input_tokens"), "output_tokens beside it, or neither")
    if math.isnan(found.ttft_ms) and math.isnan(found.tpot_ms):
        raise InputError(f"{prefix}ttft_ms", None, "ttft_ms, tpot_ms or both: milliseconds, means over requests")
    return found


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def read_observations_csv(path: str | Path) -> list[Observation]:
    """The rows of a CSV with some of `COLUMNS`, or of `PROFILE` in place of TPOT."""
    try:
        table = pd.read_csv(path)
    except (OSError, ValueError, UnicodeDecodeError) as error:
        words = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError("--local", str(path), f"a readable CSV file ({words})") from None
    rows = cast(Any, table).to_dict("records")
    if not rows:
        raise InputError("--local", str(path), "at least one row")
    try:
        given = [_with_profile({str(k): v for k, v in row.items()}, Path(path), i + 2) for i, row in enumerate(rows)]
        return [checked(row, str(path), f"row {i + 2}") for i, row in enumerate(given)]
    except InputError as error:
        raise error.inside(file=str(path)) from None


def _with_profile(row: dict[str, Any], table: Path, number_: int) -> dict[str, Any]:
    """The row with TPOT from the profile that it names in place of a measured one."""
    profile, steps, ranks = (_blank(row.pop(name, None)) for name in PROFILE)
    if profile is None:
        return row
    if _blank(row.get("tpot_ms")) is not None:
        raise InputError(f"row {number_}.tpot_ms", row["tpot_ms"], "nothing where a profile is given")
    file = table.parent / str(profile)
    if not file.is_file():
        raise InputError(f"row {number_}.profile", str(profile), "a file, relative to the table")
    return row | {"tpot_ms": 1e3 * step_s(file, steps, ranks)}


def _blank(value: Any) -> Any:
    return None if value is None or value == "" or (isinstance(value, float) and math.isnan(value)) else value


def _workload(deployed: Deployed, seen: Observation) -> Workload:
    base = deployed.study.workload
    if math.isfinite(seen.input_tokens):
        spec = session_spec(
            {"first_prompt_tokens": max(seen.input_tokens, 1.0), "output_tokens": max(seen.output_tokens, 2.0)}
        )
        base = workload(spec, MAX_CONTEXT, sessions=SAMPLES)
    load: dict[str, Any] = {"sessions_per_second": None, "concurrent_sessions": None, "first_wave_share": None}
    if seen.closed:
        wave = min(seen.concurrency / seen.requests, 1.0) if math.isfinite(seen.requests) else 0.0
        load |= {"concurrent_sessions": np.float32(seen.concurrency), "first_wave_share": np.float32(wave)}
    else:
        load["sessions_per_second"] = np.float32(seen.requests_per_second / float(base.calls_per_session))
    return dataclasses.replace(base, **load)


def _inputs(deployed: Deployed, seen: Sequence[Observation]) -> Inputs:
    """Observations of one kind of load on a deployment, as benchmark points."""
    study = deployed.study
    deployment = study.evaluator().deployment(np.array([0], np.int64), 1)
    catalog = dataclasses.replace(study.catalog, local=None)
    return Inputs(
        jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * len(seen)), deployment),
        stacked([_workload(deployed, one) for one in seen]),
        stacked([catalog.llm] * len(seen)),
        jnp.zeros(len(seen), jnp.int32),
        stacked([catalog.engine]),
        jnp.ones(len(seen)),
        catalog,
        uncorrected(len(seen)),
    )


def times_of_observations(deployed: Deployed, seen: Sequence[Observation]) -> Times:
    """The model's times of observations on a deployment, in their order; nan where it does not fit."""
    kinds = [[i for i, one in enumerate(seen) if one.closed == closed] for closed in (True, False)]
    given = [(rows, _inputs(deployed, [seen[i] for i in rows])) for rows in kinds if rows]

    def times(correction: Correction) -> Floats:
        out = np.full((len(seen), 2), np.nan)
        for rows, inputs in given:
            own = jax.tree.map(lambda leaf, rows=rows: leaf[np.array(rows)], correction)
            found = predict_jitted(dataclasses.replace(inputs, correction=own))
            out[rows] = np.stack([np.asarray(found.ttft_s), np.asarray(found.tpot_s)], -1)
        return out

    return times
