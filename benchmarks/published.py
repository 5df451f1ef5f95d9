"""Published results beside what breakeven says of the same question: the table of docs/accuracy.md.

    python benchmarks/published.py

Each claim is one study of studies/published, every candidate of it evaluated. Signs and orders are what counts: the
systems, kernels and traces behind the figures are not ours. tests/test_published.py holds what is said here.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from breakeven.studies.study import Study

FOLDER = Path(__file__).parents[1] / "studies" / "published"
SHARED = ("colocated", "chunked")


class Claim(NamedTuple):
    """What was published, what breakeven finds, and whether sign or order are the same."""

    source: str
    what: str
    published: str
    found: str
    agrees: bool


def candidates(name: str, *changes: str) -> pd.DataFrame:
    """Every feasible candidate of a published study that meets the SLO, with its choices and outcome.

    `load` is calls per second within the SLO, `tokens` generated tokens per second; `decode_accelerators` the
    accelerators that no prefill pool holds.
    """
    study = Study.load(FOLDER / f"{name}.yaml", changes)
    columns = study.evaluator()(np.arange(study.space.size))
    frame = study.space.frame(columns["candidate"])
    outcomes = ("goodput_per_s", "cost_per_hour_usd", "accelerators", "cache_hit", "ttft_mean_s", "tpot_mean_s")
    frame = frame.assign(**{key: columns[key] for key in (*outcomes, "meets_slo", "utilization_prefill")})
    prefill = frame["prefill_replicas"] * frame["prefill_tensor_parallel"] * frame["prefill_data_parallel"]
    apart = frame["topology"].isin(["pd", "afd"])
    frame = frame.assign(
        load=frame["goodput_per_s"],
        tokens=columns["sessions_per_second"] * float(study.workload.mean_steps),
        prefill_accelerators=prefill,
        decode_accelerators=frame["accelerators"] - prefill.where(apart, 0),
    )
    return frame.loc[columns["meets_slo"]]


def most(frame: pd.DataFrame, per: str, of: str = "load", **where: str | tuple[str, ...]) -> float:
    """The most `of` for each unit of `per` among candidates with these choices."""
    for column, allowed in where.items():
        frame = frame.loc[frame[column].isin([allowed] if isinstance(allowed, str) else allowed)]
    return float(np.max(frame[of].to_numpy() / frame[per].to_numpy(), initial=0.0))


LENGTHS = {
    "coding": (),
    "conversation": (
        "workload.first_prompt_tokens={lognormal: [6.63, 0.985], min: 2, max: 14050}",
        "workload.output_tokens={lognormal: [5.02, 0.86], min: 1, max: 1000}",
    ),
}


def splitwise() -> list[Claim]:
    """Requests per dollar of the best split over the best fleet of whole machines, which mix both phases."""
    source, claims = "Splitwise, arXiv:2311.18677", []
    for words, lengths in LENGTHS.items():
        found = candidates("splitwise", *lengths)
        split, mixed = (
            most(found, "cost_per_hour_usd", topology="pd"),
            most(found, "cost_per_hour_usd", topology=SHARED),
        )
        what = f"Llama-2-70B, {words}, A100 and H100 machines: requests per dollar, split over mixed"
        claims.append(
            Claim(source, what, "1.75 (1.4 × the load at 0.8 × the cost)", f"{split / mixed:.2f}", split > mixed)
        )
    return claims


def distserve() -> list[Claim]:
    """Requests per GPU of the best split over one pool that prefills first, as the system it was compared with did."""
    source, claims = "DistServe, arXiv:2401.09670", []
    for engine, tpot_s in (("vllm", 0.1), ("vllm-eager", 0.04)):
        # Its engines send the first token at once.
        own = f"engine={{like: {engine}, first_chunk_steps: 0, handover_s: 0}}"
        found = candidates("distserve", own, f"slo.tpot_s={tpot_s}")
        split, first, chunked = (most(found, "accelerators", topology=name) for name in ("pd", *SHARED))
        what = f"OPT-13B, ShareGPT, A100, TTFT 200 ms, TPOT {1000 * tpot_s:.0f} ms, {engine}'s steps: requests per GPU"
        said = f"split {split:.2f}, prefill first {first:.2f}, chunked {chunked:.2f}"
        claims.append(Claim(source, what, "split 1.56, ahead of prefill first", said, split > first))
    return claims


def deepseek() -> list[Claim]:
    """Tokens per second and accelerator of wide expert parallelism, prefill on 32 and decode on 128."""
    found = candidates("deepseek-h800")
    sustained = found["goodput_per_s"] * 4096.0 / found["prefill_accelerators"] / found["utilization_prefill"]
    prefill, decode = float(np.median(sustained.to_numpy())), most(found, "decode_accelerators", "tokens")
    source, what = "DeepSeek-V3 on H800 (InferSim)", "FP8, experts over 4 and 16 nodes, 4,096 tokens held: tokens/s/GPU"
    return [
        Claim(source, f"{what}, prefill", "7,839", f"{prefill:,.0f}", abs(prefill / 7839 - 1.0) < 0.3),
        Claim(source, f"{what}, decode within 50 ms", "2,324", f"{decode:,.0f}", abs(decode / 2324 - 1.0) < 0.3),
    ]


def step_3() -> list[Claim]:
    """Decode with attention apart from the feed-forward layers, beside one pool and beside DeepSeek-V3."""
    found = candidates("step-3")
    apart, one = (most(found, "decode_accelerators", "tokens", topology=name) for name in ("afd", "pd"))
    other = most(candidates("deepseek-h800"), "decode_accelerators", "tokens")
    what = "Step-3 with AFD over DeepSeek-V3, H800, FP8, 4,096 tokens held, 50 ms: decode tokens/s/GPU"
    said = f"{apart:,.0f} over {other:,.0f}: {apart / other:.2f} (without AFD {one:,.0f})"
    return [Claim("Step-3, arXiv:2507.19427", what, "4,039 over 2,324: 1.74", said, apart > other and apart > one)]


def megascale() -> list[Claim]:
    """Decode with experts on accelerators of their own, on one kind and on the best kind for each."""
    source, what = "MegaScale-Infer, arXiv:2504.02263", "Mixtral-8x22B, TPOT 150 ms, decode"
    found = candidates("megascale-infer")
    apart, one = (most(found, "decode_accelerators", "tokens", topology=name) for name in ("afd", "pd"))
    kinds = (f"space.{pool}.accelerators=[h20, l40s]" for pool in ("decode", "attention", "ffn"))
    mixed = candidates("megascale-infer", *kinds, f"prices.own={PRICES}")
    decode_usd = mixed["cost_per_hour_usd"] - mixed["prefill_accelerators"] * PRICES["a100-sxm-80gb"]
    mixed = mixed.assign(decode_usd=decode_usd)
    uniform = most(mixed, "decode_usd", "tokens", topology="pd")
    unlike = most(
        mixed, "decode_usd", "tokens", topology="afd", decode_accelerator="h20", decode_ffn_accelerator="l40s"
    )
    return [
        Claim(
            source, f"{what}, A100: tokens/s/GPU, apart over one pool", "up to 1.90", f"{apart / one:.2f}", apart > one
        ),
        Claim(
            source,
            f"{what}, attention on H20, experts on L40S: tokens/s per dollar over the best of one kind",
            "up to 1.86",
            f"{unlike / uniform:.2f}",
            unlike > uniform,
        ),
    ]


PRICES = {"a100-sxm-80gb": 2.26, "h20": 1.85, "l40s": 1.08}  # USD per hour, the paper's ratios (recalled)


def heteropanacea() -> list[Claim]:
    """What each split carries at equal cost beside the best single pool, by input per output."""
    rows = {}
    for tokens in (100, 1000, 10_000):
        found = candidates("heteropanacea", f"workload.first_prompt_tokens={tokens}")
        one = most(found, "cost_per_hour_usd", topology=SHARED)
        rows[tokens / 1000] = {
            name: most(found, "cost_per_hour_usd", topology=name) / one for name in ("pd", "af", "pdaf")
        }
    gains = pd.DataFrame(rows)
    source, what = "HeteroPanacea, arXiv:2608.03741", "Llama-3.1-405B on H100, 0.1, 1, 10 tokens in per token out"

    def said(name: str) -> str:
        return " / ".join(f"{x:.2f}" for x in gains.loc[name])

    rising = {name: bool(np.all(np.diff(gains.loc[name]) > 0.0)) for name in gains.index}
    four = gains.loc["pdaf"]
    return [
        Claim(source, f"{what}: load of PD over one pool", "grows with the prefill share", said("pd"), rising["pd"]),
        Claim(source, f"{what}: PDAF", "below 1 at a ratio of 1, above from 10 on", said("pdaf"),
              rising["pdaf"] and four.iloc[1] < 1.0 < four.iloc[2]),
        Claim(source, f"{what}: AF alone", "0.20 to 0.65, loses", said("af"), bool(np.all(gains.loc["af"] < 1.0))),
    ]  # fmt: skip


def routing() -> list[Claim]:
    """On a coding-agent trace, what routing to the cache does and what a split adds to it."""
    found = candidates("routing")
    found = found.loc[found["accelerators"] == FLEET]

    def mean(column: str, topology: str, routed: str) -> float:
        chosen = (found["topology"] == topology) & (found["routing"] == routed)
        return float(np.min(found.loc[chosen, column].to_numpy()))

    source = "agentic-kvc (vLLM 0.18, GLM-5.1, 2.1 M coding-agent requests)"
    hits = [mean("cache_hit", "chunked", name) for name in ("balanced", "affinity")]
    ttft_s = [mean("ttft_mean_s", name, "affinity") for name in ("chunked", "pd")]
    tpot_s = [mean("tpot_mean_s", name, "affinity") for name in ("chunked", "pd")]
    what = "GLM-5 for coding agents on 64 H200"
    return [
        Claim(source, f"{what}: cache hits, balanced and routed to the cache", "20.8 and 44.7 %",
              f"{hits[0]:.0%} and {hits[1]:.0%}", hits[1] > 2.0 * hits[0]),
        Claim(source, f"{what}: TTFT of the best split over one pool, both routed", "1.72",
              f"{ttft_s[1] / ttft_s[0]:.2f}", ttft_s[1] > 1.2 * ttft_s[0]),
        Claim(source, f"{what}: TPOT of the best split over one pool, both routed", "no gain",
              f"{tpot_s[1] / tpot_s[0]:.2f}", tpot_s[1] > 0.95 * tpot_s[0]),
    ]  # fmt: skip


def million_tokens() -> list[Claim]:
    """Seconds of a lone prompt whose tokens sixteen nodes share; within a quarter is taken as the same."""
    source, what = "Context parallelism, arXiv:2411.01783", "Llama-3.1-405B, 16 nodes of eight H100: TTFT of"
    claims = []
    for tokens, there_s in ((1_000_000, 77.0), (131_072, 3.8)):
        found = candidates(
            "million-tokens", f"workload.first_prompt_tokens={tokens}", "space.decode.pipeline_parallel=2"
        )
        found_s = float(found.loc[found["prefill_context_parallel"] == NODES, "ttft_mean_s"].min())
        same = abs(found_s / there_s - 1.0) < 0.25
        question = f"{what} a prompt of {tokens:,} tokens, seconds"
        claims.append(Claim(source, question, f"{there_s:g}", f"{found_s:.1f}", same))
    return claims


FLEET, NODES = 64, 16
QUESTIONS: tuple[Callable[[], list[Claim]], ...] = (
    splitwise, distserve, deepseek, step_3, megascale, heteropanacea, routing, million_tokens,
)  # fmt: skip


def main() -> None:
    """Print the table."""
    print("| published | question | there | breakeven | same sign or order |\n|---|---|---|---|---|")
    for question in QUESTIONS:
        for claim in question():
            print(f"| {claim.source} | {claim.what} | {claim.published} | {claim.found} | "
                  f"{'yes' if claim.agrees else 'no'} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
