"""One deployment, term by term: the same performance function with its intermediate terms kept."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from breakeven.models.attainment import attain
from breakeven.models.deployment import Deployment
from breakeven.models.kernel_curves import extrapolated, sources
from breakeven.models.kv_transfer import coding_s
from breakeven.models.local import Correction
from breakeven.models.memory import pool_weights_bytes
from breakeven.models.performance import Performance
from breakeven.models.placement import traffic
from breakeven.models.serving import attained_under_stress
from breakeven.models.tables import Resolved
from breakeven.models.topology import topology
from breakeven.models.workload import Workload
from breakeven.optimizer.evaluator import Evaluator
from breakeven.studies.attribution import Bill, bill_from
from breakeven.studies.deployment_file import Deployed, choices
from breakeven.studies.economics import against_api
from breakeven.studies.result import table
from breakeven.studies.study import Study

Section = dict[str, Any]

_CAUSES = {
    "products_s": "matrix products",
    "experts_s": "experts",
    "attention_s": "attention and KV cache",
    "collective_s": "collectives",
    "overhead_s": "launches and scheduling",
    "transfer_s": "activations between pools",
}


@dataclass(frozen=True)
class Explanation:
    """Sections of named numbers and words, in the order they are shown."""

    title: str
    sections: dict[str, Section]


def _number(value: Any) -> float:
    return float(np.asarray(value).ravel()[0])


_attained = jax.jit(attain)


def explain(deployed: Deployed) -> Explanation:
    """Evaluate one deployment and lay out what its time, memory and money go into."""
    evaluator = deployed.study.evaluator()
    row = table(evaluator, np.array([0], np.int64)).iloc[0].to_dict()
    return explain_candidate(deployed.study, evaluator, row, deployed.title)


def explain_candidate(study: Study, evaluator: Evaluator, row: dict[str, Any], title: str) -> Explanation:
    """The same of a candidate of a study's space that is evaluated already, as a row of its table."""
    workload, resolved, found = evaluator.performance(int(row["candidate"]), row["sessions_per_second"])
    deployment = evaluator.deployment(np.array([row["candidate"]], np.int64), 1)
    met = _attained(found.latency, study.slo)
    sections = {
        "deployment": {"verdict": _verdict(row), **choices(row), "unverified": row["unverified"] or "no"},
        "SLO": _slo(study, met, row),
        "uncertainty, 80 % interval": _uncertainty(row),
        "time to first token, mean": _first_token(found, row, resolved, study),
        "decode step, mean": _step(found),
        **_bills(bill_from(study, title, workload, resolved, found)),
        **_stress(study, workload, deployment, row),
        **_apart(resolved, study),
        "use": _use(row),
        "memory of one engine": _memory(found, study),
        "money and power": _money(row, study),
        "load": _load(row, study),
        "sources": _sources(study) | _extrapolated(resolved, found, study),
    }
    if resolved.correction is not None:
        sections["local calibration"] = _local(study, resolved.correction)
    return Explanation(title, sections)


def _bills(found: Bill) -> dict[str, Section]:
    """The mean call's time and the fleet's dollars by the same rows, each with the term that dominates it."""
    words = {name: f" ({term})" for name, term in found.dominant.items()}
    seconds = {f"{name}{words.get(name, '')}_s": value for name, value in found.seconds.items() if value}
    money = {f"{name}{words.get(name, '')}": value for name, value in found.usd_per_hour.items() if value}
    return {
        "bill of a call's time, by its dominant term": seconds | {"total_s": found.total_s},
        "bill of an hour, USD": money | {"total": found.total_usd_per_hour},
    }


def _verdict(row: dict[str, Any]) -> str:
    if not row["feasible"]:
        return f"infeasible: {row['reason']}"
    return "meets the SLO" if row["meets_slo"] else "misses the SLO"


def _slo(study: Study, met: Any, row: dict[str, Any]) -> Section:
    written, fields = study.written.slo, {"ttft": "ttft_s", "tpot": "tpot_s", "call": "call_s", "session": "session_s"}
    out: Section = {"target": written.target, "attainment": row["slo_attainment"]}
    for name, field in fields.items():
        bound = getattr(written, field)
        if bound is not None:
            seconds = bound if isinstance(bound, float | int) else bound.bound
            out[f"P({field} <= {seconds:g})"] = _number(getattr(met, name))
    percentiles = ("ttft_p50_s", "ttft_p95_s", "tpot_p50_s", "tpot_p95_s", "call_p95_s", "session_p95_s")
    return out | {name: row[name] for name in percentiles}


def _stress(study: Study, workload: Workload, deployment: Deployment, row: dict[str, Any]) -> dict[str, Section]:
    """The attainment that is left after each pool's loss, and at each peak; nothing where the study asks for none."""
    if study.slo.losses is None and workload.peaks is None:
        return {}
    lost, peaks = attained_under_stress(deployment, workload, study.slo, study.catalog)
    pools, load = topology(row["topology"]).pools, study.written.load
    asked = None if isinstance(load, str) else load.peaks
    times = {} if asked is None else {phase: factor for phase, factor in asked if factor > 1.0}
    named = [f"{factor:g} times the tokens of {phase}" for phase, factor in times.items()]
    sections = {
        f"SLO attainment with {study.written.limits.lost_replicas} of a pool's replicas lost": (pools, lost),
        "SLO attainment at peaks": (named, peaks),
    }
    return {
        title: dict(zip(names, np.asarray(left)[:, 0].tolist(), strict=False))
        for title, (names, left) in sections.items()
        if len(left)
    }


def _uncertainty(row: dict[str, Any]) -> Section:
    """Ends of the intervals that the residuals of left-out hardware and models give."""
    names = {"TTFT, mean": "ttft_mean_{}_s", "TPOT, mean": "tpot_mean_{}_s", "SLO attainment": "slo_attainment_{}"}
    out: Section = {
        f"{words}, {side}{'_s' if name.endswith('_s') else ''}": row[name.format(side)]
        for words, name in names.items()
        for side in ("low", "high")
    }
    if row["kv_band"]:
        out["TTFT"] = "a band rather than a number: the KV cache is about full, the wait for room nothing or minutes"
    return out


def _by_cause(terms: Any, factor: float = 1.0) -> Section:
    """Seconds by cause, only those that are not zero, and the name of the largest."""
    seconds = {words: factor * _number(getattr(terms, name)) for name, words in _CAUSES.items()}
    shown = {f"{words}_s": value for words, value in seconds.items() if value > 0.0}
    return shown | {"largest": max(seconds, key=lambda words: seconds[words])}


def _first_token(found: Performance, row: dict[str, Any], resolved: Resolved, study: Study) -> Section:
    point, latency = found.point, found.latency
    return {
        "total_s": row["ttft_mean_s"],
        "waiting_s": _number(latency.waiting_s),
        **{f"prefill: {k}": v for k, v in _by_cause(found.prefill_call).items()},
        **_encoder(found),
        **_kv_transfer(found),
        **_coding(found, resolved, study),
        **_tiers(found, row),
        "handling of the request_s": _number(found.pools.request_s),
        "first tokens on their way out_s": _number(latency.first_chunk_s),
        "prefixes evicted": 1.0 - row["cache_hit"],
        "extra prefill of a call that lost its prefix_s": _number(
            found.pools.missed_latency_s - found.pools.prefill_latency_s
        ),
        "prefill stretched by decodes that ride along": _number(point.riding),
    }


def _kv_transfer(found: Performance) -> Section:
    """What a call waits for its KV cache to cross, and, where that differs, what the link does."""
    pools, moved = found.pools, found.point.moved
    out: Section = {"KV transfer_s": _number(moved.waited_s)}
    if _number(moved.link_s) > _number(moved.waited_s):
        out["KV transfer, with what hides behind prefill_s"] = _number(moved.link_s)
    if _number(found.point.kept) > 0.0:
        out["calls whose session decode still holds"] = _number(found.point.kept)
    if _number(found.point.local) > 0.0 and pools.retained is not None:
        out["calls prefilled by decode"] = _number(found.point.local)
        out["of it prefill by decode_s"] = _number(pools.retained.local_moments.first)
    if pools.return_s is not None and _number(pools.return_s) > 0.0:
        out["KV of the output on its way back, in the gap_s"] = _number(pools.return_s)
    return out


def _coding(found: Performance, resolved: Resolved, study: Study) -> Section:
    """What coding the cache of a mean prompt takes by itself; its slowest part is in the transfer."""
    tokens = jnp.atleast_1d(jnp.asarray(study.workload.mean_prompt, jnp.float32))
    coding = coding_s(resolved, study.catalog, tokens)
    if coding is None or _number(found.pools.moves) < 0.5:
        return {}
    return {"beside it: compressing the cache_s": _number(coding[0]), "beside it: restoring it_s": _number(coding[1])}


def _encoder(found: Performance) -> Section:
    """What a call's images take before its prefill; nothing where it has none."""
    encode = found.pools.encode
    if encode is None:
        return {}
    shown = {f"vision encoder: {k}": v for k, v in _by_cause(encode.terms).items()}
    if _number(encode.link_s) > 0.0:
        shown |= {"embedding transfer_s": _number(encode.link_s)}
    if _number(encode.joined) < 0.5:
        shown |= {"of it waiting, for the encoder_s": _number(found.encode.average_s)}
    return shown


def _tiers(found: Performance, row: dict[str, Any]) -> Section:
    """What the tiers of KV cache below HBM do for a call; nothing where there are none."""
    if found.pools.reload is None or row["kv_tiers"] == "none":
        return {}
    return {
        "prefixes read back from tiers": row["cache_reload"],
        "of it waiting, reading a prefix back_s": _number(found.reads.wait.mean_s),
    }


def _step(found: Performance) -> Section:
    point = found.point
    return {
        "batch": _number(point.state.batch),
        "step_s": _number(found.decode_step.total_s),
        **_by_cause(found.decode_step),
        "slowdown by prefill in the pool": _number(point.slowdown),
        "time per output token_s": _number(found.latency.tpot_mean_s),
        "calls that wait for room in the batch": _number(found.admission.probability),
    }


def _apart(resolved: Resolved, study: Study) -> dict[str, Section]:
    """What the two sides of an attention/FFN split hold and exchange; nothing without one."""
    llm, place = study.catalog.llm, resolved.placement
    rows: Section = {}
    for phase in ("prefill", "decode"):
        a, f = getattr(resolved, f"{phase}_attention").choice, getattr(resolved, f"{phase}_ffn").choice
        if _number(a.pool) == _number(f.pool):
            continue
        sent = traffic(llm, f.expert_parallel, place, None if place is None else getattr(place, phase))
        held = (_number(pool_weights_bytes(resolved, side.pool, llm)) / 2.0**30 for side in (a, f))
        rows |= {
            f"{phase}: activations of a token to the feed-forward side, bytes": _number(sent.there_bytes),
            f"{phase}: and back, bytes": _number(sent.back_bytes),
            f"{phase}: hand-offs of a pass, each direction": _number(sent.handoffs),
            f"{phase}: weights per accelerator of the attention side, GiB": next(held),
            f"{phase}: weights per accelerator of the feed-forward side, GiB": next(held),
        }
    return {"attention and feed-forward layers apart": rows} if rows else {}


def _use(row: dict[str, Any]) -> Section:
    names = ("prefill", "decode", "link", "encode")
    names = *(f"utilization_{name}" for name in names), "mfu_prefill", "mfu_decode", "mbu_decode"
    return {name: row[name] for name in names}


def _memory(found: Performance, study: Study) -> Section:
    gib = 2.0**30
    out: Section = {}
    for phase, memory in (("prefill", found.pools.prefill_memory), ("decode", found.pools.decode_memory)):
        out[f"{phase}: weights per accelerator, GiB"] = _number(memory.weights_bytes) / gib
        out[f"{phase}: left for KV per accelerator, GiB"] = _number(memory.free_bytes) / gib
        out[f"{phase}: KV capacity, tokens"] = _number(memory.capacity_tokens)
    return out | {
        "longest sequence, tokens": float(np.asarray(study.workload.max_tokens)),
        "in use by active sequences, tokens": _number(found.point.active_tokens),
    }


def _money(row: dict[str, Any], study: Study) -> Section:
    names = (
        "cost_per_hour_usd",
        "cost_per_million_tokens_usd",
        "complexity_usd_per_hour",
        "cost_per_session_usd",
        "cost_per_solved_task_usd",
        "solved_tasks_per_hour",
        "idle_cost_prefill_usd_per_hour",
        "idle_cost_decode_usd_per_hour",
        "accelerators",
        "power_kw",
        "energy_per_token_j",
    )
    prices = dict(zip(study.names.accelerator_ids, study.prices_usd_per_hour, strict=True))
    found = {name: row[name] for name in names} | {f"{k}, usd_per_hour": v for k, v in prices.items()}
    for accelerator, bill in zip(study.accelerators, study.bills, strict=True):
        if bill is not None:
            found |= {f"{accelerator.id} owned, {name}, usd_per_hour": v for name, v in bill._asdict().items()}
    api = against_api(study, row)
    return found | ({} if api is None else {f"API: {k}": v for k, v in api._asdict().items()})


def _load(row: dict[str, Any], study: Study) -> Section:
    w = study.workload
    return {
        "sessions_per_second": row["sessions_per_second"],
        "sessions_in_progress": row["sessions_in_progress"],
        "sessions_per_accelerator": row["sessions_per_accelerator"],
        "sessions_per_kw": row["sessions_per_kw"],
        "session_mean_s": row["session_mean_s"],
        "calls_per_second": row["sessions_per_second"] * float(np.asarray(w.calls_per_session)),
        "tokens_per_second": row["tokens_per_second"],
        "prompt of a call, tokens": float(np.asarray(w.mean_prompt)),
        "of it new, prefix held, tokens": float(np.asarray(w.resident.mean_tokens)),
        "output of a call, tokens": float(np.asarray(w.mean_output)),
        **_images(study),
    }


def _images(study: Study) -> Section:
    images = study.workload.images
    if images is None:
        return {}
    return {
        "images of a call": float(np.asarray(images.mean_per_call)),
        "of each, patches": float(np.asarray(images.patches)),
        "of each, tokens": float(np.asarray(images.tokens)),
    }


def _local(study: Study, applied: Correction) -> Section:
    """What was measured on the user's own system, and what of it applies here."""
    out: Section = {
        "decode steps, times": _number(applied.decode_factor),
        "prefill, times": _number(applied.prefill_factor),
        "added to TTFT_s": _number(applied.first_token_s),
    }
    return out | {one.where(): f"{one.words()} ({one.measured})" for one in study.local}


def _sources(study: Study) -> Section:
    out: Section = {"llm": study.architecture.source}
    for row in study.accelerators:
        out[row.id] = "; ".join(row.sources) or "stated by the user"
        if row.recalled:
            out[f"{row.id}, only recalled"] = ", ".join(row.recalled)
        for name, dispute in row.disputed.items():
            out[f"{row.id}, disputed {name}"] = dispute
        out |= sources(row.generation)
    return out


def _extrapolated(resolved: Any, found: Performance, study: Study) -> Section:
    """Operators that this deployment uses at sizes no kernel was measured at, by accelerator generation."""
    w, llm = study.workload, study.catalog.llm
    kv = "bf16" if _number(resolved.kv_bytes_per_element) > 1.5 else "fp8"
    kind = "mla" if _number(llm.latent) > 0.5 else "attention"
    hidden_bytes, batch = 2.0 * _number(llm.hidden), max(_number(found.point.state.batch), 1.0)
    out: Section = {}
    for phase, stage in (("prefill", resolved.prefill_attention), ("decode", resolved.decode_attention)):
        ranks, budget = _number(stage.choice.tensor_parallel), _number(stage.choice.token_budget)
        tokens = min(budget, float(np.asarray(w.resident.mean_tokens))) if phase == "prefill" else batch
        context = float(np.asarray(w.mean_prompt if phase == "prefill" else w.decode_context))
        sizes = {
            f"{phase}_{kind}_{kv}": {"isl" if phase == "prefill" else "context": context, "batch_size": batch},
            "gemm_bf16": {"m": tokens},
        }
        if ranks > 1.0:
            sizes["allreduce"] = {"ranks": ranks, "bytes": hidden_bytes * tokens}
        generation = study.accelerators[int(_number(stage.choice.accelerator))].generation
        for operator, values in sizes.items():
            beyond = extrapolated(generation, operator, values)
            if beyond:
                out[f"{generation} {operator}, extrapolated"] = "; ".join(beyond)
    return out
