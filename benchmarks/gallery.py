"""The gallery of docs/answers.md: run the shipped studies, draw the pictures, write the page.

    python benchmarks/gallery.py [--no-verify] [--only agents,io-ratio]

Everything on the page comes from the runs: `docs/answers/*.csv` hold the figures, the pictures and the sentences are
made of them. What gallery.yaml asks takes a few minutes on two idle cores.
"""

import argparse
import datetime
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
import yaml
from matplotlib.colors import TwoSlopeNorm

from breakeven.studies.economics import is_split
from breakeven.studies.figures import plt, save, style
from breakeven.studies.result import records
from breakeven.studies.run import remember_compiled, run
from breakeven.studies.study import Study

mpl.use("Agg")
ROOT = Path(__file__).parents[1]
PAGE, FIGURES = ROOT / "docs" / "answers.md", ROOT / "docs" / "answers"
COLUMNS = ("best", "split", "shared", "ratio", "cost_per_hour_usd", "cost_per_session_usd", "simulated", "command")
NONE = "none"
PAYS = 1.0 - 1e-4  # below it, beyond rounding, a split pays


def answer(study: str, changes: Sequence[str], verify: bool) -> dict[str, Any]:
    """Run a shipped study with changes: the best split, the best shared pool, what one costs beside the other."""
    shown = " ".join(f"--set {shlex.quote(change)}" for change in changes)
    loaded = Study.load(ROOT / "studies" / f"{study}.yaml", [*changes, f"search.verify={str(verify).lower()}"])
    result = run(loaded)
    families = records(result.families)
    split = next((row for row in families if is_split(row)), None)
    shared = next((row for row in families if not is_split(row)), None)
    best = families[0] if families else None
    cost = [np.nan if row is None else float(row["cost_per_hour_usd"]) for row in (split, shared)]
    return {
        "best": NONE if best is None else f"{best['topology']}: {best['deployment']}",
        "split": NONE if split is None else f"{split['topology']}: {split['deployment']}",
        "shared": NONE if shared is None else f"{shared['topology']}: {shared['deployment']}",
        "ratio": cost[0] / cost[1],
        "cost_per_hour_usd": np.nan if best is None else float(best["cost_per_hour_usd"]),
        "cost_per_session_usd": np.nan if best is None else float(best["cost_per_session_usd"]),
        "simulated": np.nan if best is None else float(best.get("slo_attainment_simulated", np.nan)),
        "command": f"breakeven run {study} {shown}",
        "accelerators": np.nan if best is None else float(best["accelerators"]),
        "candidates": result.found.evaluated,
        "why_not": "" if best is not None else result.why_not(),
    }


def variants(question: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """(what is varied, changes) of every run that a question takes."""
    if "rows" in question:
        for row, of_row in question["rows"].items():
            for column, of_column in question["columns"].items():
                load = question["loads"][row][column]
                changes = [*of_column, *of_row, f"load={{calls_per_second: {load}}}"]
                yield {"workload": row, "model": column, "calls_per_second": load}, changes
    elif "over" in question:
        path = "space.links" if question["over"] == "links" else question["over"]
        loads = question.get("loads", [None] * len(question["values"]))
        for value, load in zip(question["values"], loads, strict=True):
            changes = [] if load is None else [f"load={{calls_per_second: {load}}}"]
            yield {question["over"]: value}, [f"{path}={value}", *changes]
    else:
        (first, across), (second, up) = question["grid"].items()
        for a in across:
            for b in up:
                path = "space.prefill.accelerators.0"
                yield {first: a, second: b}, [f"{path}.{first}={float(a)}", f"{path}.{second}={float(b)}"]


def ask(name: str, question: dict[str, Any], verify: bool) -> pd.DataFrame:
    """Every run of a question, one row each."""
    rows = []
    for varied, changes in variants(question):
        clock = time.perf_counter()
        found = answer(question["study"], changes, verify)
        rows.append(varied | found)
        print(
            f"{name} {varied}: {found['best']} ratio {found['ratio']:.3g} ({time.perf_counter() - clock:.0f} s)",
            flush=True,
        )
    frame = pd.DataFrame(rows)
    FIGURES.mkdir(parents=True, exist_ok=True)
    frame.to_csv(FIGURES / f"{name}.csv", index=False, float_format="%.5g")
    return frame


def _ratio_words(row: dict[str, Any]) -> str:
    if np.isfinite(row["ratio"]):
        return f"{row['ratio']:.2f}"
    if row["split"] != NONE:
        return "only\nsplit"
    return "only\nshared" if row["shared"] != NONE else "neither"


def heatmap(frame: pd.DataFrame, rows: str, columns: str, title: str, path: Path) -> None:
    """Cost of the best split over that of the best shared pool, blue where the split pays."""
    wide = frame.pivot(index=rows, columns=columns, values="ratio")
    words = pd.DataFrame([r | {"words": _ratio_words(r)} for r in records(frame)])
    words = words.pivot(index=rows, columns=columns, values="words")
    order = list(dict.fromkeys(frame[rows])), list(dict.fromkeys(frame[columns]))
    wide, words = wide.loc[order[0], order[1]], words.loc[order[0], order[1]]
    with style():
        figure, axes = plt.subplots(
            figsize=(1.6 * len(order[1]) + 3.2, 0.62 * len(order[0]) + 2.2), layout="constrained"
        )
        norm = TwoSlopeNorm(1.0, 0.6, 1.8)
        sns.heatmap(wide, annot=words, fmt="", cmap="RdBu_r", norm=norm, ax=axes, linewidths=1.0,
                    cbar_kws={"label": "cost of best split ÷ best shared pool"})  # fmt: skip
        axes.grid(visible=False)
        axes.set_facecolor("0.85")
        for i, j in zip(*np.nonzero(wide.isna().to_numpy()), strict=True):
            axes.text(j + 0.5, i + 0.5, words.iloc[i, j], ha="center", va="center")
        axes.set_title(title, loc="left", weight="bold")
        axes.tick_params(axis="y", rotation=0)
        save(figure, path, f"study {path.stem} · seed 0 · benchmarks/gallery.py")


def series(frame: pd.DataFrame, x: str, label: str, title: str, path: Path) -> None:
    """The cost ratio along one field, below one where the split pays."""
    numeric = pd.api.types.is_numeric_dtype(frame[x])
    with style():
        figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
        places = frame[x].to_numpy(float) if numeric else np.arange(len(frame))
        colours = ["#0173b2" if r < PAYS else "#de8f05" for r in frame["ratio"]]
        if numeric:
            axes.plot(places, frame["ratio"], color="0.5", linewidth=1.2)
            axes.set_xscale("log")
            axes.scatter(places, frame["ratio"], c=colours, s=60, zorder=3)
        else:
            axes.bar(places, frame["ratio"], color=colours, width=0.6)
            axes.set_xticks(places, list(frame[x]))
        for place, row in zip(places, records(frame), strict=True):
            if np.isfinite(row["ratio"]):
                axes.annotate(
                    f"{row['ratio']:.2f}", (place, row["ratio"]), xytext=(0, 7), textcoords="offset points", ha="center"
                )
        axes.axhline(1.0, color="0.2", linestyle="--", linewidth=1.4)
        axes.set_ylim(0.0, 1.15 * float(np.nanmax([1.0, *frame["ratio"]])))
        axes.set_xlabel(label)
        axes.set_ylabel("cost of best split ÷ best shared pool")
        axes.set_title(title, loc="left", weight="bold")
        save(figure, path, f"study {path.stem} · seed 0 · benchmarks/gallery.py")


def table(frame: pd.DataFrame, varied: Sequence[str]) -> str:
    """The runs as a Markdown table."""
    lines = ["| " + " | ".join([*varied, "best", "accelerators", "USD/session", "split ÷ shared", "simulated"]) + " |"]
    lines.append("|" + "---|" * len(varied) + "---|---:|---:|---:|---:|")
    for row in records(frame):
        cells = [f"{row[name]:,g}" if isinstance(row[name], int | float) else str(row[name]) for name in varied]
        simulated = f"{row['simulated']:.1%}" if np.isfinite(row["simulated"]) else ""
        session = f"{row['cost_per_session_usd']:.3g}" if np.isfinite(row["cost_per_session_usd"]) else ""
        count = f"{row['accelerators']:,.0f}" if np.isfinite(row["accelerators"]) else ""
        best = row["best"] if row["best"] != NONE else f"none: {row['why_not']}"
        cells += [best, count, session, _ratio_words(row).replace("\n", " "), simulated]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _count(frame: pd.DataFrame) -> str:
    """How often a split pays, in words."""
    both = frame.loc[frame["ratio"].notna()]
    pays = sum(ratio < PAYS for ratio in both["ratio"])
    only = sum(s != NONE and j == NONE for s, j in zip(frame["split"], frame["shared"], strict=True))
    words = f"A split pays in {pays} of {len(both)} cases where both meet the target"
    return words + (f"; in {only} more only a split does." if only else ".")


def _crossing(frame: pd.DataFrame, x: str) -> str:
    """Between which values the ratio passes one, in words."""
    known = frame.loc[frame["ratio"].notna()]
    pays = known["ratio"].to_numpy() < PAYS
    values = [f"{v:,g}" if isinstance(v, int | float) else str(v) for v in known[x]]
    changes = [i for i in range(1, len(pays)) if pays[i] != pays[i - 1]]
    if not changes:
        return f"A split {'pays' if len(pays) and pays[0] else 'does not pay'} at any of them."
    said = [f"{'pays from' if pays[i] else 'stops to pay at'} {values[i]} (not at {values[i - 1]})" for i in changes]
    return "A split " + ", and ".join(said) + "."


INTRODUCTION = """\
Written by `python benchmarks/gallery.py` on {day} from {evaluated:,} evaluated candidates; the figures stand in
[answers/](answers). {checked} Every answer is one command, as below; `breakeven report DIR` and `breakeven explain
DIR` say why.

Prices are on-demand medians, and running a second pool costs nothing here: `prices.pool_usd_per_month` states what it
costs you, and a run says how much it may cost until a split no longer pays. A ratio below 1 is a split that pays.
Fleets are small and replicas come in steps: within a tenth of 1 the answer is a tie. Simulation tests queues and
caches, not step times; those of split deployments and of wide expert parallelism are the least certain
([accuracy](accuracy.md))."""

# What each section says beside its figures.
AGENTS = """\
H100, H200 and B200 to choose from per pool, FP8, InfiniBand NDR between pools, 95 % of the calls in time. DeepSeek's
latent cache does not shard: in a shared pool, tensor-parallel engines hold it once per accelerator and run out of room
for prefixes, and data-parallel ones wait on every rank while one prefills; a split can have each where it suits. With
host DRAM behind HBM (`--set space.kv_tiers=[none,host-dram]`) its deep research needs half the shared pool."""
FIVE_TOKENS = """\
Each call prefills 55 tokens and decodes five; 8,000 to 10,000 tokens of context, over a gigabyte of KV cache, cross the
link each time. On one H100 the 55 tokens are 0.9 ms of arithmetic (55 × 16 GFLOP at 989 TFLOP/s) beside 5 ms of reading
weights (16 GB at 3.35 TB/s): twice the arithmetic buys little, and a faster link takes only the transfer away."""
IO_RATIO = """\
HeteroPanacea (arXiv:2608.03741, as quoted) has prefill/decode disaggregation win on most models at 100 tokens in per
token out, on its own hardware, models and loads."""
SPECIALISED = """\
Factors on an H100's compute and price, at half its memory bandwidth; decode and the shared pool are H100."""
SOLVE = """\
    breakeven payoff specialised --x space.prefill.accelerators.0.compute=1:8:13:log \\
        --y space.prefill.accelerators.0.price=0.25:2:13:log
    breakeven payoff specialised --solve space.prefill.accelerators.0.price"""


def page(frames: dict[str, pd.DataFrame]) -> str:
    """docs/answers.md, from the figures of every question."""
    evaluated = sum(int(np.sum(frame["candidates"].to_numpy(int))) for frame in frames.values())
    count = sum(bool(np.isfinite(value)) for frame in frames.values() for value in frame["simulated"])
    checked = f"{count} of {sum(map(len, frames.values()))} answers are simulated: where the last column says so."
    today = datetime.date.today().isoformat()
    parts = ["# When does disaggregation pay?", INTRODUCTION.format(day=today, evaluated=evaluated, checked=checked)]
    for name, (title, varied, said, words) in SECTIONS.items():
        if name not in frames:
            continue
        frame = frames[name]
        parts += [f"## {title}", f"{said(frame)} {words}", f"![Cost ratios: {title}](answers/{name}.png)"]
        parts += [table(frame, varied), f"    {frame['command'].iloc[0]}"]
        parts += [SOLVE] if name == "specialised" else []
    return "\n\n".join(parts) + "\n"


PROMPT = "workload.first_prompt_tokens"
SECTIONS: dict[str, tuple[str, tuple[str, ...], Callable[[pd.DataFrame], str], str]] = {
    "agents": ("Six kinds of agents on three models", ("workload", "model", "calls_per_second"), _count, AGENTS),
    "five-tokens": (
        "Five tokens between tool calls, a prefill accelerator twice as fast",
        ("links",),
        lambda frame: _crossing(frame, "links"),
        FIVE_TOKENS,
    ),
    "io-ratio": ("Tokens in over 1,000 tokens out", (PROMPT,), lambda frame: _crossing(frame, PROMPT), IO_RATIO),
    "specialised": ("What specialised prefill hardware must offer", ("compute", "price"), _count, SPECIALISED),
}


def draw(frames: dict[str, pd.DataFrame]) -> None:
    """One picture a question."""
    if "agents" in frames:
        heatmap(frames["agents"], "workload", "model", "Does a split pay?", FIGURES / "agents.png")
    if "five-tokens" in frames:
        title = "Five tokens out, 50 new in, 8,000 held; prefill twice as fast"
        series(frames["five-tokens"], "links", "link between the pools", title, FIGURES / "five-tokens.png")
    if "io-ratio" in frames:
        path = "workload.first_prompt_tokens"
        series(
            frames["io-ratio"], path, "prompt, tokens (1,000 out)", "Llama-3.1-70B on GPUs", FIGURES / "io-ratio.png"
        )
    if "specialised" in frames:
        title = "A prefill accelerator: compute and price, × an H100's"
        heatmap(frames["specialised"], "price", "compute", title, FIGURES / "specialised.png")


def main() -> None:
    """Ask what is asked for, keep what was answered before, write pictures and page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="questions to ask again, separated by commas")
    parser.add_argument("--no-verify", action="store_true", help="the model alone, no simulation")
    given = parser.parse_args()
    questions = yaml.safe_load((Path(__file__).parent / "gallery.yaml").read_text(encoding="utf-8"))
    asked = [name for name in given.only.split(",") if name] or list(questions)
    remember_compiled()
    frames = {}
    for name in questions:
        stored = FIGURES / f"{name}.csv"
        if name in asked:
            frames[name] = ask(name, questions[name], not given.no_verify)
        elif stored.exists():
            frames[name] = pd.read_csv(
                stored, keep_default_na=False, na_values={c: [""] for c in ("ratio", "simulated")}
            )
    draw(frames)
    PAGE.write_text(page(frames), encoding="utf-8")


if __name__ == "__main__":
    main()
