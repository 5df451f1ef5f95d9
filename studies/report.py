"""report.html and report.md: what a run's folder holds, as one page to hand on."""

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from breakeven.models.inputs import InputError
from breakeven.studies.console import front_columns, thinned
from breakeven.studies.deployment_file import FAMILIES, FRONT, RECORD, choices, read_record
from breakeven.studies.document import Bars, Block, Code, Document, Items, Paragraph, Picture, Table
from breakeven.studies.explain import explain_candidate
from breakeven.studies.mixed import COMPARED, compared
from breakeven.studies.result import EXPLANATION, MIXED_FILES, SIMULATED, Result, records
from breakeven.studies.words import duration, seconds, share, usd

Row = dict[str, Any]
REPORT = "report.html"

# Pictures that other commands leave in the folder: name, heading, caption.
_PICTURES = (
    ("payoff.png", "Where a split pays", "Cost of the best split over that of the best shared pool"),
    ("sweep.png", "What if", "The optimum found again at each value"),
    (
        "sensitivity.png",
        "What the answer depends on",
        "Elasticities, and what the spread comes from",
    ),
)
_TABLES = (("solve.csv", "Break-even point"),)
_MOST_ROWS = 16


def write_report(folder: Path) -> None:
    """Write report.html and report.md from what is in an output folder. Raises InputError if no run is."""
    document = report(folder)
    (folder / REPORT).write_text(document.html(), encoding="utf-8")
    (folder / "report.md").write_text(document.markdown(), encoding="utf-8")


def write_explanation(result: Result, folder: Path) -> None:
    """Write the chosen deployment's explanation into the folder, for the report; none where nothing was chosen."""
    path = folder / EXPLANATION
    if result.best is None:
        path.unlink(missing_ok=True)
        return
    found = explain_candidate(result.study, result.study.evaluator(), result.best, "best")
    text = json.dumps({"title": found.title, **found.sections}, indent=2, ensure_ascii=False, default=float)
    path.write_text(text, encoding="utf-8")


def report(folder: Path) -> Document:
    """The page: decision, front, the winner's bills, what other commands added, verification, assumptions."""
    record = read_record(folder)
    families, front = _frame(folder / FAMILIES), _frame(folder / FRONT)
    study = record["study"]
    out = Document(f"{study['name']}: when does disaggregation pay?", str(study.get("about", "")))
    lines = record.get("answer", [])
    out.add("", *[Paragraph(line, "lead") for line in lines[:2]], *[Paragraph(line) for line in lines[2:]])
    caption = "A dot is a candidate, a line the front of a topology, the star what was chosen"
    out.add("Cost against SLO attainment", _picture(folder, "pareto.png", caption))
    out.add("Best of each topology that meets the target", _deployments(families))
    best = records(families.iloc[:1])[0] if len(families) else None
    out.add("A mix of accelerators", *_mix(record.get("mixed"), best))
    if best is not None:
        out.add("Where the money goes", *_money(best, record))
    explanation = _explanation(folder)
    if explanation:
        out.add("Where the time goes", *_time(explanation))
    for name, heading, caption in _PICTURES:
        out.add(heading, _picture(folder, name, caption))
    for name, heading in _TABLES:
        out.add(heading, _table_file(folder / name))
    out.add("Front", _deployments(thinned(front, _MOST_ROWS)), _left_out(front))
    out.add("Verification", *_verification(pd.concat([families, front]).drop_duplicates("candidate"), record))
    out.add("Assumptions", *_assumptions(record))
    out.add("How to repeat it", *_repeat(record, folder))
    return out


def _mix(mixed: Mapping[str, Any] | None, single: Row | None) -> list[Block]:
    """What two cells with unlike accelerators come to, beside one deployment."""
    if not mixed or mixed["best"] is None:
        return []
    table = Table(COMPARED, compared(mixed["best"], single), frozenset(("", "deployment", "topology")))
    how = f"All {mixed['pairs_on_front']} pairs that no other one beats in cost and attainment: {MIXED_FILES[0]}."
    return [table, Paragraph(how, "note")]


def _frame(path: Path) -> pd.DataFrame:
    try:
        return pd.read_csv(path, keep_default_na=False, na_values={name: [""] for name in SIMULATED})
    except (OSError, ValueError):
        raise InputError("folder", str(path.parent), f"{path.name} cannot be read") from None


def _picture(folder: Path, name: str, caption: str) -> Picture | None:
    return Picture(folder / name, caption) if (folder / name).exists() else None


def _table_file(path: Path) -> Block | None:
    if not path.exists():
        return None
    frame = pd.read_csv(path, keep_default_na=False).head(2 * _MOST_ROWS)
    words = frozenset(str(c) for c in frame if frame[c].dtype == object)
    cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row] for row in frame.to_numpy(object).tolist()]
    return Table([str(c) for c in frame], cells, words)


def _explanation(folder: Path) -> Mapping[str, Any]:
    try:
        return json.loads((folder / EXPLANATION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _deployments(frame: pd.DataFrame) -> Block:
    if frame.empty:
        return Paragraph("none")
    columns = [(name, words or "note", form) for name, words, form in front_columns(frame)]
    rows = [[form(row[name]) for name, _, form in columns] for row in records(frame)]
    return Table([words for _, words, _ in columns], rows, frozenset(("deployment", "topology", "KV", "note")))


def _left_out(front: pd.DataFrame) -> Block | None:
    left = len(front) - len(thinned(front, _MOST_ROWS))
    return Paragraph(f"{left} more in {FRONT}.", "note") if left else None


def pools_of(row: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The pools of a row of front.csv by name."""
    return {name: pool for name, pool in choices(row).items() if isinstance(pool, Mapping)}


def _accelerators(pool: Mapping[str, Any]) -> int:
    sizes = ("replicas", "tensor_parallel", "data_parallel", "pipeline_parallel", "context_parallel")
    count = 1
    for name in sizes:
        count *= int(pool.get(name, 1))
    return count


def _money(best: Row, record: Mapping[str, Any]) -> list[Block]:
    """USD per hour by pool, of it idle; what running it takes; and per session, task and token."""
    prices = record["resolved"]["accelerators"]
    rows: list[tuple[str, float, str]] = []
    for name, pool in pools_of(best).items():
        count, kind = _accelerators(pool), str(pool["accelerator"])
        cost = count * prices[kind]["usd_per_hour"]
        words = f"{count} × {kind} at {prices[kind]['usd_per_hour']:,.2f}"
        rows.append((f"{name}: {words}", cost, f"{cost:,.2f} USD/h"))
    complexity, total = float(best["complexity_usd_per_hour"]), float(best["cost_per_hour_usd"])
    rest = total - complexity - sum(size for _, size, _ in rows)
    if abs(rest) > 1e-3 * total:
        rows.append(("electricity, and instances paid whole", rest, f"{rest:,.2f} USD/h"))
    if complexity:
        rows.append(("running further pools and kinds", complexity, f"{complexity:,.2f} USD/h"))
    rows.append(("total", total, f"{total:,.2f} USD/h"))
    idle = sum(float(best[name]) for name in best if str(name).startswith("idle_cost_"))
    per = [
        f"{usd(float(best['cost_per_session_usd']))} USD a session, "
        f"{usd(float(best['cost_per_solved_task_usd']))} USD a solved task, "
        f"{usd(float(best['cost_per_million_tokens_usd']))} USD a million generated tokens.",
        f"{usd(idle)} USD an hour are paid for accelerators that wait.",
        f"{float(best['accelerators']):,.0f} accelerators, {float(best['power_kw']):,.3g} kW provisioned; "
        f"{float(best['sessions_per_accelerator']):,.3g} sessions in progress per accelerator, "
        f"{float(best['sessions_per_kw']):,.3g} per kW.",
    ]
    return [Bars(rows), Items(per)]


def _parts(section: Mapping[str, Any], total: str, keep: Iterable[str] | None = None) -> Bars:
    """The parts of a section's `total`, what is left over named as the rest."""
    parts = {k: float(v) for k, v in section.items() if k.endswith("_s") and k != total and isinstance(v, int | float)}
    if keep is not None:
        parts = {k: v for k, v in parts.items() if any(k.startswith(word) for word in keep)}
    whole = float(section[total])
    rest = whole - sum(parts.values())
    if abs(rest) > 0.005 * whole:
        parts["the rest_s"] = rest
    rows = [(k.removesuffix("_s"), v, seconds(v)) for k, v in parts.items() if v > 0.0]
    return Bars([*rows, ("total", whole, seconds(whole))])


def _time(explanation: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    first = explanation.get("time to first token, mean", {})
    if "total_s" in first:
        parts = ("waiting", "prefill:", "KV transfer", "handling", "first tokens")
        blocks += [Paragraph("Time to first token of a mean call:"), _parts(first, "total_s", parts)]
        blocks.append(
            Paragraph("The rest: prefixes lost, and what pipelines and decodes that ride along change.", "note")
        )
    step = explanation.get("decode step, mean", {})
    if "step_s" in step:
        causes = ("matrix products", "experts", "attention", "collectives", "launches", "activations")
        batch = f"A decode step of a batch of {float(step['batch']):.3g}:"
        blocks += [Paragraph(batch), _parts(step, "step_s", causes)]
    use = explanation.get("use", {})
    words = [f"{k.replace('_', ' ')}: {float(v):.1%}" for k, v in use.items() if isinstance(v, int | float)]
    return [*blocks, *([Items(words)] if words else [])]


def _verification(frame: pd.DataFrame, record: Mapping[str, Any]) -> list[Block]:
    if not set(SIMULATED) <= set(frame):
        return [Paragraph("Nothing was simulated: these are the model's own words.")]
    shown = frame.loc[frame["slo_attainment_simulated"].notna()]
    if shown.empty:
        return [Paragraph("Nothing was simulated: these are the model's own words.")]
    away = (shown["slo_attainment_simulated"] - shown["slo_attainment"]).abs()
    rows = [
        [
            str(row["deployment"]),
            share(row["slo_attainment"]),
            share(row["slo_attainment_simulated"]),
            f"{share(row['slo_attainment_simulated_low'])} to {share(row['slo_attainment_simulated_high'])}",
        ]
        for row in records(shown.head(_MOST_ROWS))
    ]
    heading = ("deployment", "model", "simulated", "95 % interval")
    return [
        Paragraph(
            f"{record['candidates_simulated']} candidates were simulated, call by call. Of those listed the model's "
            f"attainment is {away.mean():.3f} away on average, {away.max():.3f} at most."
        ),
        Table(heading, rows, frozenset(("deployment",))),
    ]


def _assumptions(record: Mapping[str, Any]) -> list[Block]:
    resolved, study = record["resolved"], record["study"]
    llm, workload = resolved["llm"], resolved["workload"]
    lines = [
        f"Model {llm['name']}: {llm['parameters'] / 1e9:,.4g} B parameters, "
        f"{llm['active_parameters'] / 1e9:,.4g} B active; {llm['source']}",
        f"Workload {workload['name']}: {workload['calls_per_session']:.3g} calls a session, "
        f"{workload['mean_prompt']:,.0f} tokens a prompt, of them {workload['new_prefill_tokens_per_call']:,.0f} new, "
        f"{workload['mean_output']:,.0f} out, {duration(workload['gap_mean_s'])} between calls on average",
    ]
    lines += [str(workload["recorded"])] if "recorded" in workload else []
    if resolved.get("uncertain"):
        lines += [str(line) for line in resolved["uncertain"]]
    money = [f"{k}: {v}" for k, v in {**study.get("prices", {}), **study.get("economics", {})}.items()]
    lines.append("Prices: " + ("; ".join(money) if money else "on-demand, median of providers"))
    if "pool_usd_per_month" not in study.get("prices", {}):
        lines.append("Running a second pool is assumed to cost nothing: prices.pool_usd_per_month states it")
    rows = []
    for name, row in resolved["accelerators"].items():
        trust = [f"only recalled: {', '.join(row['recalled'])}"] if row["recalled"] else []
        trust += [f"disputed {k}: {v}" for k, v in row["disputed"].items()]
        sources = "; ".join(row["sources"]) or "the study's own"
        rows.append([name, f"{row['usd_per_hour']:,.2f}", sources, ". ".join(trust)])
    table = Table(("accelerator", "USD/h", "sources", "trust"), rows, frozenset(("accelerator", "sources", "trust")))
    blocks: list[Block] = [Items(lines), table]
    owning = record.get("economics", {}).get("owning_usd_per_hour", {})
    if owning:
        blocks.append(_owning(owning))
        owner = record["economics"]["ownership"]
        named = [(name, words) for name, words in owner["sources"].items() if name in owner]
        stated = [f"{name.replace('_', ' ')} {owner[name]:g}: {words}" for name, words in named]
        blocks += [Paragraph(f"Owner: {owner['profile']}"), Items(stated)]
    return blocks


def _owning(owning: Mapping[str, Any]) -> Table:
    parts = ("purchase", "facility", "staff", "electricity")
    rows = [
        [name, f"{bill['server_usd']:,.0f}", *[f"{bill[part]:.3f}" for part in parts], str(bill["source"])]
        for name, bill in owning.items()
    ]
    heading = ("owned", "server, USD", *[f"{part}, USD/h" for part in parts], "source")
    return Table(heading, rows, frozenset(("owned", "source")))


def _repeat(record: Mapping[str, Any], folder: Path) -> list[Block]:
    versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    name = Path(record["file"]).name
    return [
        Paragraph(
            f"{record['candidates_evaluated']:,} of {record['candidates_in_space']:,} candidates evaluated in "
            f"{record['evaluation_seconds']:.1f} s, {record['search']} search, seed {record['seed']}. {versions}."
        ),
        Paragraph(f"Save the study below as {name}; the folder's {RECORD} has it with everything it stood for."),
        Code(f"breakeven run {shlex.quote(name)}\nbreakeven explain {shlex.quote(folder.name)}"),
        Code(yaml.safe_dump(record["study"], sort_keys=False, allow_unicode=True), "The study"),
    ]
