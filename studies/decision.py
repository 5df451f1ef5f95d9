"""The answer of a run in sentences: the choice, and what the best of the other kind costs beside it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from breakeven.studies.economics import is_split
from breakeven.studies.study import Study
from breakeven.studies.words import share

Row = dict[str, Any]


def decision(study: Study, families: Sequence[Row], rank: str, why_not: Callable[[], str]) -> list[str]:
    """The best of each topology that meets the target, best first by the column `rank`, in sentences."""
    target = study.written.slo.target
    if not families:
        return [f"Nothing meets the target of {target:g}: {why_not()}."]
    best = families[0]
    unit = "calls/s within the SLO" if study.max_load else "USD per hour"
    word = "Most load" if study.max_load else "Cheapest"
    choice = (
        f"{word} that meets the target of {target:g}: {best['deployment']} ({best['topology']}, KV {best['kv']}), "
        f"{best[rank]:,.2f} {unit}, attainment {share(best['slo_attainment'])}{simulated_words(best)}"
        + (f". Unverified: {best['unverified']}." if best["unverified"] else ".")
    )
    return [choice, *_other_kind(study, families, rank)]


def _other_kind(study: Study, families: Sequence[Row], rank: str) -> list[str]:
    split = next((row for row in families if is_split(row)), None)
    joint = next((row for row in families if not is_split(row)), None)
    if split is not None and joint is not None:
        ratio = float(split[rank] / joint[rank])
        pays = ratio > 1.0 if study.max_load else ratio < 1.0
        what = "carries" if study.max_load else "costs"
        if abs(ratio - 1.0) < 0.0005:
            return [f"It is a tie: the best split ({split['topology']}) {what} as much as the best shared pool."]
        return [
            f"Disaggregation {'pays' if pays else 'does not pay'} here: the best split ({split['topology']}) {what} "
            f"{ratio:.2f} times what the best shared pool ({joint['topology']}) {what}."
        ]
    names = {row["topology"] for row in families}
    missing = [f.topology.name for f in study.space.families if f.topology.name not in names]
    return [f"No {' or '.join(missing)} deployment in the space meets the target."] if missing else []


def simulated_words(row: Row) -> str:
    """The simulated attainment of a row in words, if there is one."""
    value = row.get("slo_attainment_simulated", np.nan)
    if not np.isfinite(value):
        return ""
    half = 0.5 * (row["slo_attainment_simulated_high"] - row["slo_attainment_simulated_low"])
    return f", simulated {share(value)} ± {half:.2%}"
