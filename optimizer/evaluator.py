"""Candidates in, columns out: blocks of fixed size through the jitted model, percentiles for the few that matter."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from breakeven.models.attainment import (
    Bound,
    Latency,
    Slo,
    attain,
    call_cdf,
    percentile,
    session_cdf,
    tpot_cdf,
    ttft_cdf,
)
from breakeven.models.deployment import Deployment
from breakeven.models.limits import Doubts, Violations
from breakeven.models.operating_point import most_sequences
from breakeven.models.performance import Performance, performance
from breakeven.models.residuals import interval
from breakeven.models.screening import screen
from breakeven.models.serving import LIGHTEST, Outcome, evaluate, evaluate_max_load
from breakeven.models.tables import Catalog, Resolved, resolve
from breakeven.models.workload import Workload
from breakeven.spaces.space import Space

BLOCK = 8192  # fits the caches of a core
SMALL = 512  # for small spaces, and for percentiles of a front

Columns = dict[str, np.ndarray]


@jax.jit
def _performance(deployment: Deployment, workload: Workload, catalog: Catalog) -> tuple[Resolved, Performance]:
    """Everything the model says of a block; compiled once for percentiles, intervals and explanations."""
    resolved = resolve(deployment, catalog)
    return resolved, performance(resolved, workload, catalog)


@jax.jit
def _means(found: Performance, workload: Workload) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(mean TTFT, mean TPOT, how much of what a decode engine holds at once is in use)."""
    fill = found.point.state.batch / most_sequences(found.pools, workload)
    return found.latency.ttft_mean_s, found.latency.tpot_mean_s, fill


@jax.jit
def _attainment(latency: Latency, slo: Slo, ttft: jax.Array, tpot: jax.Array) -> jax.Array:
    """SLO attainment if TTFT were `ttft` and TPOT `tpot` times what is predicted: its bounds divided by them.

    The time of a call is mostly decode: it takes the factor of TPOT.
    """

    def bound(value: Bound | None, factor: jax.Array) -> Bound | None:
        return None if value is None else Bound(value.bound_s / factor, value.fraction)

    moved = dataclasses.replace(
        slo,
        ttft=bound(slo.ttft, ttft),
        tpot=bound(slo.tpot, tpot),
        call=bound(slo.call, tpot),
        session=bound(slo.session, tpot),
    )
    return attain(latency, moved).slo


def _call_time_cdf(latency: Latency, x_s: jax.Array) -> jax.Array:
    far = jnp.full_like(x_s, 1e9)
    return call_cdf(latency, far, far, x_s)


PERCENTILES: dict[str, tuple[Callable[[Latency, jax.Array], jax.Array], float]] = {
    "ttft_p50_s": (ttft_cdf, 0.50),
    "ttft_p95_s": (ttft_cdf, 0.95),
    "tpot_p50_s": (tpot_cdf, 0.50),
    "tpot_p95_s": (tpot_cdf, 0.95),
    "call_p95_s": (_call_time_cdf, 0.95),
    "session_p50_s": (session_cdf, 0.50),
    "session_p95_s": (session_cdf, 0.95),
}


@jax.jit
def _percentiles(latency: Latency) -> dict[str, jax.Array]:
    return {name: percentile(cdf, latency, share) for name, (cdf, share) in PERCENTILES.items()}


@jax.jit
def _session_p95(latency: Latency) -> jax.Array:
    return percentile(session_cdf, latency, 0.95)


@dataclass(frozen=True)
class Evaluator:
    """Evaluates candidates of a space by number, padded to blocks of one size so that nothing recompiles."""

    space: Space
    workload: Workload
    slo: Slo
    catalog: Catalog
    session_p95: bool = False  # an objective needs it for every candidate
    max_load: bool = False  # each candidate at the largest load that meets the SLO
    engine: str = ""  # whose residuals say how far predictions may be off
    size: int | None = None  # candidates per call of the model, where not as many as suit the space

    @property
    def block(self) -> int:
        """Candidates per call of the model."""
        if self.size is not None:
            return self.size
        return BLOCK if self.space.size > 8 * SMALL else SMALL

    def in_blocks_of(self, most: int) -> Self:
        """The same with at most so many candidates per call: less padding where few are asked for at once."""
        return dataclasses.replace(self, size=min(self.block, most))

    def deployment(self, ids: np.ndarray, size: int) -> Deployment:
        """Candidates padded to `size` with the last one."""
        padded = np.concatenate([ids, np.full(size - len(ids), ids[-1], np.int64)]) if len(ids) < size else ids
        return self.space.deployment(padded)

    def start(self, ids: np.ndarray) -> tuple[np.ndarray, Outcome, jax.Array | None]:
        """Begin evaluating one block; the arrays arrive while the caller goes on."""
        deployment = self.deployment(ids, self.block)
        model = evaluate_max_load if self.max_load else evaluate
        outcome = model(deployment, self.workload, self.slo, self.catalog)
        p95 = None
        if self.session_p95:
            loaded = self.workload_at(outcome.sessions_per_second)
            p95 = _session_p95(_performance(deployment, loaded, self.catalog)[1].latency)
        return ids, outcome, p95

    def finish(self, started: tuple[np.ndarray, Outcome, jax.Array | None]) -> Columns:
        """Columns of a started block, one value per candidate."""
        ids, outcome, p95 = started
        n = len(ids)
        columns: Columns = {"candidate": ids}
        for name, value in outcome._asdict().items():
            if isinstance(value, Violations):
                columns |= {f"excess_{k}": np.asarray(v)[:n] for k, v in value._asdict().items()}
            elif isinstance(value, Doubts):
                columns |= {f"doubt_{k}": np.asarray(v)[:n] for k, v in value._asdict().items()}
            else:
                columns[name] = np.asarray(value)[:n]
        stresses = {"loss": ("lost", self.slo.losses), "peak": ("peak", self.workload.peaks)}
        for limit, (name, stress) in stresses.items():
            if stress is not None:
                columns[f"{name}_attainment"] = (1.0 - columns[f"excess_{limit}"]) * float(self.slo.target)
        if p95 is not None:
            columns["session_p95_s"] = np.asarray(p95)[:n]
        return columns

    def workload_at(self, sessions_per_second: np.ndarray | jax.Array) -> Workload:
        """The workload at the load each candidate was evaluated at."""
        if not self.max_load:
            return self.workload
        return dataclasses.replace(self.workload, sessions_per_second=jnp.asarray(sessions_per_second))

    def __call__(self, ids: np.ndarray) -> Columns:
        """Columns of any number of candidates."""
        parts = list(self.parts(np.asarray(ids, np.int64)))
        return parts[0] if len(parts) == 1 else {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}

    def parts(self, ids: np.ndarray) -> Iterator[Columns]:
        """Columns of any number of candidates, a block at a time."""
        for i in range(0, len(ids), self.block):
            yield self.finish(self.start(ids[i : i + self.block]))

    def screen(self, ids: np.ndarray) -> Columns:
        """Lower bounds of the excess over each limit, one column each: a candidate that breaks one is infeasible."""
        ids = np.asarray(ids, np.int64)
        loaded = self.workload
        if self.max_load:  # a candidate that breaks a limit at the lightest load is reported there
            loaded = dataclasses.replace(loaded, sessions_per_second=jnp.float32(LIGHTEST))
        columns: Columns = {"candidate": ids} | {f"excess_{k}": np.empty(len(ids), np.float32) for k in REASONS}
        for start in range(0, len(ids), self.block):
            some = ids[start : start + self.block]
            bounds = screen(self.deployment(some, self.block), loaded, self.catalog)
            for name, excess in bounds._asdict().items():
                columns[f"excess_{name}"][start : start + self.block] = np.asarray(excess)[: len(some)]
        return columns

    def sift(self, ids: np.ndarray) -> tuple[np.ndarray, Columns]:
        """(candidates that no limit rules out beforehand, the excesses of the others)."""
        columns = self.screen(ids)
        out = np.zeros(len(columns["candidate"]), bool)
        for name in REASONS:
            out |= columns[f"excess_{name}"] > 0.0
        return columns["candidate"][~out], {name: column[out] for name, column in columns.items()}

    def performances(
        self, ids: np.ndarray, sessions_per_second: np.ndarray
    ) -> Iterator[tuple[int, Workload, Resolved, Performance]]:
        """(how many, their workload, their hardware, all that the model says of them) of a few candidates at the load
        they were evaluated at, in blocks padded to `SMALL`."""
        for start in range(0, len(ids), SMALL):
            some, rate = ids[start : start + SMALL], sessions_per_second[start : start + SMALL]
            loaded = self.workload_at(np.pad(rate, (0, SMALL - len(rate)), mode="edge"))
            yield len(some), loaded, *_performance(self.deployment(some, SMALL), loaded, self.catalog)

    def performance(self, candidate: int, sessions_per_second: float) -> tuple[Workload, Resolved, Performance]:
        """The same of one candidate, as NumPy arrays of shapes (1, ...)."""
        ids, rate = np.array([candidate], np.int64), np.array([sessions_per_second])
        [(_, _, *found)] = self.performances(ids, rate)

        def first(leaf: jax.Array) -> np.ndarray:
            return np.asarray(leaf[:1] if leaf.shape[:1] == (SMALL,) else leaf)

        return self.workload_at(rate), *jax.tree.map(first, jax.device_get(tuple(found)))

    def details(self, ids: np.ndarray, sessions_per_second: np.ndarray) -> Columns:
        """Of a few candidates: latency percentiles, seconds, and how far predictions may be off: means and attainment
        at the ends of 80 % intervals."""
        parts = []
        for n, workload, resolved, found in self.performances(ids, sessions_per_second):
            columns = {name: np.asarray(value) for name, value in _percentiles(found.latency).items()}
            columns |= self._intervals(workload, resolved, found)
            parts.append({name: value[:n] for name, value in columns.items()})
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _intervals(self, workload: Workload, resolved: Resolved, performed: Performance) -> Columns:
        ttft_s, tpot_s, fill = (np.asarray(value) for value in _means(performed, workload))
        pools = (np.asarray(stage.choice.pool) for stage in (resolved.prefill_attention, resolved.decode_attention))
        found = interval(self.engine, np.not_equal(*pools), fill)
        columns = {"kv_band": found.band}
        for side, other in (("low", "high"), ("high", "low")):
            ttft, tpot = getattr(found, f"ttft_{side}"), getattr(found, f"tpot_{side}")
            columns[f"ttft_mean_{side}_s"] = ttft_s * ttft
            columns[f"tpot_mean_{side}_s"] = tpot_s * tpot
            factors = np.float32(ttft), np.float32(tpot)
            columns[f"slo_attainment_{other}"] = np.asarray(_attainment(performed.latency, self.slo, *factors))
        return columns


REASONS = {
    "weights": "weights do not fit",
    "kv_cache": "no room for one sequence's KV cache",
    "prefill": "prefill saturated",
    "decode": "decode saturated",
    "link": "link saturated",
    "tiers": "path to the KV tiers saturated",
    "encode": "vision encoder saturated",
    "budget": "over budget_usd_per_hour",
    "power": "over max_power_kw",
    "inventory": "over inventory",
    "loss": "misses the target with replicas of a pool lost",
    "peak": "misses the target at a peak of prefill or decode",
}

DOUBTS = {
    "shared_pool_busy": "shared pool above half load",
    "decode_busy": "decode above 0.8",
    "batch_limit": "more than 2 % wait for the decode batch",
    "link_busy": "bursty prefill over a busy link",
    "few_prefill_engines": "one or two prefill engines under heavy-tailed prompts",
    "cache_unsettled": "a surge of sessions overturns the prefix cache for good",
    "cache_short": "more than 10 % of the prefixes evicted",
    "in_step": "prefill in step in data-parallel ranks or a bundle, or beside decode in a pipeline",
    "sides_apart": "one side of prefill alone shares a pool with decode, which is not simulated",
    "speculation": "speculation beside chunks of prefill, which is not simulated",
    "encoder": "images encoded in a decode pool, which is not simulated",
}


def reasons(columns: Columns) -> np.ndarray:
    """Why each candidate is infeasible: the first limit it breaks, in words; empty where it is feasible."""
    out = np.full(len(columns["feasible"]), "", object)
    for name, words in reversed(REASONS.items()):
        out[columns[f"excess_{name}"] > 0.0] = words
    return out


def doubts(columns: Columns) -> np.ndarray:
    """Why each candidate's attainment is unverified, in words; empty inside the trusted region."""
    code = np.zeros(len(columns["feasible"]), np.int64)
    for bit, name in enumerate(DOUBTS):
        code |= columns[f"doubt_{name}"].astype(np.int64) << bit
    texts = ["; ".join(w for bit, w in enumerate(DOUBTS.values()) if c >> bit & 1) for c in range(1 << len(DOUBTS))]
    return np.array(texts, object)[code]
