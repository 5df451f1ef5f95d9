"""The workload as the analytic model sees it: quantile nodes and moments of what its calls need.

Built once from sessions, sampled or recorded; every leaf is a 32-bit array, so a workload is an argument of
traced code and another one does not recompile. Tokens and seconds.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from breakeven.models.distributions import Distribution, Empirical, Floats
from breakeven.models.forks import Forks, ForkTime, SubAgents, largest_normal, sample_forks
from breakeven.models.inputs import number
from breakeven.models.media import Media
from breakeven.models.sessions import MAX_GAP_S, Sessions, SessionSpec, sample_sessions

Encoded = tuple[Floats, Floats]  # images of each call, probability of any
Leaf = Array  # on the host: read-only numpy arrays in 32 bit

PREFILL_NODES, OUTPUT_NODES, CALL_NODES, CACHE_POINTS = 16, 8, 16, 64
LEAST_SESSIONS = 1000  # the finest bin holds 0.23 % of them
TAIL, TAIL_RATIO = 0.2, 0.6  # share of the samples in the finer bins, and their successive ratio


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillNodes:
    """u tokens to prefill at the end of a prompt of ctx tokens: q = u (ctx - u/2) query-key pairs.

    Nodes are means over bins of rising `prefill_size`, shape (16,). Moments are raw and of scaled variables,
    moments[i, j] = E[(u / mean_tokens)^i (q / mean_pairs)^j] for i + j <= 3, from all the samples.
    """

    weight: Leaf  # the same for every prefill of a workload
    tokens: Leaf
    pairs: Leaf
    context: Leaf
    cached_sd: Leaf  # standard deviation of ctx - u among prefills of the bin that are of one size
    tokens_per_cached: Leaf  # slope of u on ctx - u among these
    mean_tokens: Leaf
    mean_pairs: Leaf
    moments: Leaf  # (4, 4)
    images: Leaf | None = None  # to encode, mean of the bin; None: text alone
    pictured: Leaf | None = None  # share of the bin's calls that have any

    def mean(self, values: Array) -> Array:
        """Mean over the calls of values by node, the last axis."""
        return jnp.dot(values, self.weight, precision="highest")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Images:
    """One image, group of video frames or window of audio."""

    patches: Leaf  # that the encoder computes, and that attend to one another
    tokens: Leaf  # of the prompt
    mean_per_call: Leaf  # new ones
    reuse: Leaf  # share whose features an engine still holds


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Workload:
    """Calls and sessions of a workload on a model of given context.

    The three prefills differ in what is still cached when a call comes: (1 - m) resident + m missed is the
    mixture when a share m of the sessions lost its cache between calls. First calls are the same in all.
    """

    calls_per_session: Leaf  # E[K]
    session_calls: Leaf  # nodes of K, (16,)
    session_weight: Leaf
    resident: PrefillNodes  # the previous prompt and output are cached
    recomputed: PrefillNodes  # the previous prompt is, its output is not: a prefill pool that never saw it
    missed: PrefillNodes  # only the shared prefix is
    output_weight: Leaf  # (8,)
    output_steps: Leaf  # decode steps after the first token, o - 1
    output_inverse: Leaf  # mean of 1 / steps, of at least one step
    output_inverse2: Leaf  # and of its square
    output_context: Leaf  # mean of ctx + o/2
    output_context_var: Leaf
    mean_steps: Leaf  # E[o - 1]
    mean_steps2: Leaf  # E[(o - 1)^2]
    decode_context: Leaf  # X: mean of ctx + o/2 weighted by o - 1
    decode_context_var: Leaf
    mean_output: Leaf
    mean_prompt: Leaf
    mean_prompt2: Leaf
    max_tokens: Leaf  # largest ctx + o
    mean_need: Leaf  # E[ctx + o]
    mean_need2: Leaf
    decode_need: Leaf  # mean of ctx + o weighted by o - 1
    decode_need_var: Leaf
    gap_mean_s: Leaf
    gap_var_s: Leaf
    thinks_per_session: Leaf  # E[K] - 1 gaps
    shared_prefix_tokens: Leaf
    idle_tokens: Leaf  # E[A], a session's own tokens left cached by a call that another one follows
    last_tokens: Leaf  # E[A_last], left by the last call
    cache_work: Leaf  # ln of (cache tokens for idle sessions / sessions per second), (64,)
    cache_miss: Leaf  # P(gap > characteristic time) there
    cache_ttl_s: Leaf  # beyond which idle sessions lose their cache; the table has it already
    arrival_cv2: Leaf  # squared coefficient of variation of the sessions' interarrival time
    sessions_per_second: Leaf | None = None  # open load, whole deployment; scalar or one per candidate
    concurrent_sessions: Leaf | None = None  # closed population; at most one of the two is given
    forks: ForkTime | None = None  # sub-agents
    first_wave_share: Leaf | None = None  # of a benchmark's requests, those that all come at its start

    def session_s(self, call_mean_s: Array, call_variance: Array | None = None) -> Array:
        """Mean time of a session whose calls take so long: its own, and its gaps with the sub-agents in them.

        Without a variance, that of calls as irregular as their outputs.
        """
        if self.forks is None:
            return self.calls_per_session * call_mean_s + (self.calls_per_session - 1.0) * self.gap_mean_s
        if call_variance is None:
            call_variance = call_mean_s**2 * jnp.maximum(self.mean_steps2 / self.mean_steps**2 - 1.0, 0.0)
        gap_s = self.gap_mean_s + self.forks.added(call_mean_s, call_variance)[0]
        return self.forks.main_calls * call_mean_s + (self.forks.main_calls - 1.0) * gap_s

    images: Images | None = None  # None: no call has anything to encode
    peaks: "Workload | None" = None  # hours of another mix, to be served too; leaves (peaks, …)


def workload(
    spec: SessionSpec, max_context: float, arrival_cv: float = 1.0, sessions: int = 20000, seed: int = 0
) -> Workload:
    """Nodes and moments of `spec` on a model of `max_context` tokens, from `sessions` sampled sessions."""
    number("workload.arrival_cv", arrival_cv, 0.0, 100.0)
    number("workload.max_context", max_context, 16.0, 1e8)
    number("workload.sessions", sessions, LEAST_SESSIONS, 1e7, whole=True)
    return _build(spec, float(max_context), float(arrival_cv), int(sessions), int(seed))


@functools.lru_cache(maxsize=32)
def _build(spec: SessionSpec, max_context: float, arrival_cv: float, sessions: int, seed: int) -> Workload:
    sample = sample_sessions(spec, sessions, seed, max_context)
    shared = spec.shared_prefix_tokens if len(spec.classes) == 1 else float(sample.shared_tokens.mean())
    agents = sample_forks(spec, sample, seed, max_context)
    built = _of_sessions(sample, spec.gap_s, shared, arrival_cv, spec.cache_ttl_s, spec.media, agents)
    if agents is None or spec.forks is None:
        return built
    gap = _gap_moments(spec.tool_gap_s)
    total = np.bincount(sample.session).mean() + agents.prompt_tokens.size / (sample.session[-1] + 1)
    return replace(built, calls_per_session=_leaf(total), forks=_fork_time(built, spec.forks, gap))


def _fork_time(built: Workload, forks: Forks, gap: tuple[float, float]) -> ForkTime:
    values = built.calls_per_session, forks.probability, forks.calls, *gap, *largest_normal(forks.width)
    return ForkTime(*(_leaf(value) for value in values))


def with_peaks(usual: Workload, peaks: Sequence[Workload]) -> Workload:
    """A workload with hours of other mixes, at the same load; none leave it as it is."""
    if not peaks:
        return usual
    return replace(usual, peaks=jax.tree.map(lambda *leaves: _leaf(np.stack(leaves)), *peaks))


def recorded_workload(sessions: Sessions, arrival_cv: float = 1.0) -> Workload:
    """Nodes and moments of the sessions themselves, with the gaps they have; each session counts once."""
    number("workload.arrival_cv", arrival_cv, 0.0, 100.0)
    gaps = sessions.gap_after_s[~sessions.last]
    gap = Empirical.of(gaps if len(gaps) else [0.0])
    return _of_sessions(_repeated(sessions), gap, float(sessions.shared_tokens.mean()), arrival_cv)


def _repeated(sessions: Sessions) -> Sessions:
    """The sessions as often as it takes to fill every bin."""
    count = int(sessions.session[-1]) + 1
    times = -(-LEAST_SESSIONS // count)
    columns = {field.name: getattr(sessions, field.name) for field in fields(Sessions)}
    tiled: dict[str, Any] = {
        name: None if column is None else np.tile(column, times) for name, column in columns.items()
    }
    tiled["session"] = tiled["session"] + count * np.repeat(np.arange(times), len(sessions.session))
    return Sessions(**tiled)


def _of_sessions(
    sample: Sessions,
    gap: Distribution,
    shared: float,
    arrival_cv: float,
    ttl_s: float = MAX_GAP_S,
    media: Media | None = None,
    agents: SubAgents | None = None,
) -> Workload:
    def of_all(name: str) -> Floats:
        own = getattr(sample, name)
        return own if agents is None else np.concatenate([own, getattr(agents, name).ravel()])

    def new_tokens(name: str) -> Floats:
        """To prefill with the prefix cached; a sub-agent's first call finds that of its parent."""
        theirs = "observation_tokens" if name == "resident_tokens" else name
        own = getattr(sample, name)
        return own if agents is None else np.concatenate([own, getattr(agents, theirs).ravel()])

    calls = np.bincount(sample.session).astype(float)
    prompt, output = of_all("prompt_tokens"), of_all("output_tokens")
    steps, need = output - 1.0, prompt + output
    left = sample.prompt_tokens + sample.output_tokens - sample.shared_tokens
    session_bins = bins(calls, CALL_NODES)
    output_bins = bins(steps, OUTPUT_NODES)
    middle, middle_var = _weighted(prompt + 0.5 * output, steps)
    reserved, reserved_var = _weighted(need, steps)
    idle = float(np.mean(left[~sample.last])) if calls.max() > 1.0 else 0.0
    work, miss = cache_table(gap, calls.mean(), idle, float(np.mean(left[sample.last])), ttl_s)
    gap_mean, gap_var = _gap_moments(gap)
    by_output = _bin_moments(prompt + 0.5 * output, output_bins)
    found, held = images_to_encode(sample, media)
    return Workload(
        calls_per_session=_leaf(calls.mean()),
        session_calls=_leaf(_bin_means(calls, session_bins)),
        session_weight=_leaf(_weights(session_bins)),
        resident=prefill_nodes(new_tokens("resident_tokens"), prompt, found),
        recomputed=prefill_nodes(new_tokens("recomputed_tokens"), prompt, found),
        missed=prefill_nodes(of_all("missed_tokens"), prompt, held),
        output_weight=_leaf(_weights(output_bins)),
        output_steps=_leaf(_bin_means(steps, output_bins)),
        output_inverse=_leaf(_bin_means(1.0 / np.maximum(steps, 1.0), output_bins)),
        output_inverse2=_leaf(_bin_means(1.0 / np.maximum(steps, 1.0) ** 2, output_bins)),
        output_context=_leaf(by_output[0]),
        output_context_var=_leaf(by_output[1]),
        mean_steps=_leaf(steps.mean()),
        mean_steps2=_leaf(np.mean(np.square(steps))),
        decode_context=_leaf(middle),
        decode_context_var=_leaf(middle_var),
        mean_output=_leaf(output.mean()),
        mean_prompt=_leaf(prompt.mean()),
        mean_prompt2=_leaf(np.mean(np.square(prompt))),
        max_tokens=_leaf(need.max()),
        mean_need=_leaf(need.mean()),
        mean_need2=_leaf(np.mean(np.square(need))),
        decode_need=_leaf(reserved),
        decode_need_var=_leaf(reserved_var),
        gap_mean_s=_leaf(gap_mean),
        gap_var_s=_leaf(gap_var),
        thinks_per_session=_leaf(calls.mean() - 1.0),
        shared_prefix_tokens=_leaf(shared),
        idle_tokens=_leaf(idle),
        last_tokens=_leaf(np.mean(left[sample.last])),
        cache_work=_leaf(work),
        cache_miss=_leaf(miss),
        cache_ttl_s=_leaf(ttl_s),
        arrival_cv2=_leaf(arrival_cv**2),
        images=None if found is None or media is None else _images(sample, media),
    )


def images_to_encode(sample: Sessions, media: Media | None) -> tuple[Encoded | None, Encoded | None]:
    """(images that a call has encoded, probability that it has any), where its prefix is cached and where it is lost;
    None where nothing is encoded. Of images seen before, some have their features kept."""
    if media is None or not media.patches or sample.images_held is None:
        return None, None

    def left(images: Floats) -> Encoded:
        return images * (1.0 - media.reuse), 1.0 - media.reuse**images

    return left(sample.images_found), left(sample.images_held)


def _images(sample: Sessions, media: Media) -> Images:
    assert sample.images is not None
    return Images(_leaf(media.patches), _leaf(media.tokens), _leaf(sample.images.mean()), _leaf(media.reuse))


def _leaf(value: object) -> Leaf:
    """A 32-bit array that nobody changes: workloads are kept and handed out again."""
    leaf = np.array(value, np.float32)
    leaf.setflags(write=False)
    return cast(Leaf, leaf)


Bins = list[NDArray[np.intp]]


def bin_edges(nodes: int) -> Floats:
    """Probabilities that part the bins: half of them even in [0, 0.8], half shrinking by 0.6 in the top 0.2.

    >>> bin_edges(4).round(3).tolist()
    [0.0, 0.4, 0.8, 0.925, 1.0]
    """
    widths = TAIL_RATIO ** np.arange(nodes // 2)
    top = 1.0 - TAIL + TAIL * np.cumsum(widths / widths.sum())
    return np.concatenate([np.linspace(0.0, 1.0 - TAIL, nodes - nodes // 2 + 1), top])


def bins(values: Floats, nodes: int) -> Bins:
    """Sample indices of each bin, in rising order of `values`."""
    return np.split(_rising(values), _cuts(len(values), nodes))


def _cuts(count: int, nodes: int) -> NDArray[np.intp]:
    return np.rint(bin_edges(nodes)[1:-1] * count).astype(np.intp)


def bins_between_gaps(values: Floats, nodes: int) -> Bins:
    """The same; where the values jump by a tenth within half a bin of where two of them part, they part there."""
    order = _rising(values)
    rising, ends = values[order], [0, *_cuts(len(values), nodes), len(values)]
    jumps, cuts = np.diff(rising), []
    for before, cut, after in zip(ends, ends[1:], ends[2:], strict=False):
        low, high = cut - (cut - before) // 2, cut + (after - cut - 1) // 2
        largest = low + int(np.argmax(jumps[low - 1 : high])) if 0 < low <= high < len(values) else cut
        apart = 0 < largest < len(values) and jumps[largest - 1] > 0.1 * rising[largest]
        cuts.append(largest if apart else cut)
    return np.split(order, cuts)


def _rising(values: Floats) -> NDArray[np.intp]:
    """Positions in rising order of `values`, ties as they stand.

    Whole numbers, as tokens and calls are, are sorted with their position in one key: several times as fast.
    """
    bits = len(values).bit_length()
    if len(values) and values.min() >= 0.0 and values.max() < 2.0 ** (62 - bits) and np.all(values == np.rint(values)):
        keys = (values.astype(np.int64) << bits) | np.arange(len(values))
        keys.sort()
        return (keys & ((1 << bits) - 1)).astype(np.intp)
    return np.argsort(values, kind="stable")


def _weights(parts: Bins) -> Floats:
    sizes = np.array([len(part) for part in parts], float)
    return sizes / sizes.sum()


def _bin_means(values: Floats, parts: Bins) -> Floats:
    return np.array([values[part].mean() for part in parts])


def _bin_moments(values: Floats, parts: Bins) -> tuple[Floats, Floats]:
    return _bin_means(values, parts), np.array([values[part].var() for part in parts])


def _weighted(values: Floats, weights: Floats) -> tuple[float, float]:
    """Mean and variance of `values` weighted by `weights`, or evenly where no weight is positive."""
    even = weights if np.any(weights > 0.0) else np.ones_like(values)
    mean = float(np.average(values, weights=even))
    return mean, float(np.average(np.square(values - mean), weights=even))


def prefill_size(tokens: Floats, context: Floats) -> Floats:
    """Orders prefills about as their seconds, whatever the model and the hardware: in eighths of a token's products.
    Attention to 30,000 others takes as long (Llama-3.1-8B to 70B 14,000 to 50,000), the transfer of 10 to 50: of 100
    here, since not all prompts cross a link.
    """
    return np.rint(8.0 * (tokens * (1.0 + (context - 0.5 * tokens) / 30_000.0) + context / 100.0))


def _of_one_size(size: Floats, tokens: Floats, cached: Floats) -> tuple[float, float]:
    """(standard deviation of cached tokens, slope of new ones on them) without what both have in common with the size:
    a bin is as wide as its sizes are apart."""
    about = size - size.mean()
    t, c = (x - x.mean() - about * (np.dot(about, x) / max(np.dot(about, about), 1e-9)) for x in (tokens, cached))
    square = float(np.dot(c, c))
    return math.sqrt(square / len(c)), float(np.dot(t, c)) / max(square, float(len(c)))


def prefill_nodes(tokens: Floats, context: Floats, encoded: Encoded | None = None) -> PrefillNodes:
    """Nodes and moments of prefilling the last `tokens` of each `context`, with its images to encode."""
    pairs, size = tokens * (context - 0.5 * tokens), prefill_size(tokens, context)
    parts, u, q = bins_between_gaps(size, PREFILL_NODES), tokens / tokens.mean(), pairs / pairs.mean()
    cached_sd, slope = zip(
        *(_of_one_size(size[part], tokens[part], (context - tokens)[part]) for part in parts), strict=True
    )
    moments, of_q = np.zeros((4, 4)), [np.ones_like(q), q, q * q, q * q * q]
    for i, of_u in enumerate((np.ones_like(u), u, u * u, u * u * u)):
        for j in range(4 - i):
            moments[i, j] = np.dot(of_u, of_q[j]) / len(u)
    return PrefillNodes(
        weight=_leaf(_weights(parts)),
        tokens=_leaf(_bin_means(tokens, parts)),
        pairs=_leaf(_bin_means(pairs, parts)),
        context=_leaf(_bin_means(context, parts)),
        cached_sd=_leaf(cached_sd),
        tokens_per_cached=_leaf(slope),
        mean_tokens=_leaf(tokens.mean()),
        mean_pairs=_leaf(pairs.mean()),
        moments=_leaf(moments),
        images=None if encoded is None else _leaf(_bin_means(encoded[0], parts)),
        pictured=None if encoded is None else _leaf(_bin_means(encoded[1], parts)),
    )


def _gap_moments(gap: Distribution) -> tuple[float, float]:
    """Mean (exact) and variance (over an even spread of quantiles) of a gap."""
    mean = gap.mean()
    spread = gap.invert((np.arange(2**15) + 0.5) / 2**15)
    return mean, float(np.mean(np.square(spread - mean)))


def cache_table(
    gap: Distribution,
    calls: float,
    idle_tokens: float,
    last_tokens: float,
    ttl_s: float = MAX_GAP_S,
    points: int = CACHE_POINTS,
) -> tuple[Floats, Floats]:
    r"""ln x and the miss probability there, x = tokens of cache for idle sessions / sessions per second.

    Under LRU with characteristic time T a session occupies, between and after its calls,

    .. math:: H(T) = (E[K] - 1)\,E[A]\,E[\min(G, T)] + E[A_{last}]\,T \quad \text{token seconds},

    so sessions at rate s fill a cache of C tokens when s H(T) = C: T is :math:`H^{-1}(x)` at x = C/s, and a
    call after a gap G finds its session's cache gone with P(G > T) (Che's approximation; A independent of G).
    A time-to-live drops what is idle for longer, which leaves P(G > min(T, ttl_s)). A workload of single calls never
    misses.
    """
    if calls <= 1.0:
        return np.linspace(0.0, 30.0, points), np.zeros(points)
    t = _times(gap)
    ln_x = np.log((calls - 1.0) * idle_tokens * gap.mean_min(t) + last_tokens * t)
    grid = np.linspace(ln_x[0], ln_x[-1], points)
    idle_s = np.minimum(np.exp(np.interp(grid, ln_x, np.log(t))), ttl_s)
    return grid, np.minimum.accumulate(1.0 - gap.cdf(idle_s))


def _times(gap: Distribution, points: int = 4000) -> Floats:
    """Characteristic times from where all gaps but 0.1 % are longer to where 0.01 % are."""
    t = np.geomspace(1e-4, 1e8, points)
    cdf = gap.cdf(t)
    low = t[max(int(np.searchsorted(cdf, 1e-3)) - 1, 0)]
    high = t[min(int(np.searchsorted(cdf, 1.0 - 1e-4)) + 1, points - 1)]
    return np.geomspace(low, high, points)
