"""What an answer means in money: what a session and a solved task cost, whether a split is worth running, owning or
renting, self-hosting or an API."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from breakeven.models.business_case import ApiCase, Horizon, SplitCase, api_case, split_case
from breakeven.models.topology import topology
from breakeven.studies.study import Study
from breakeven.studies.words import duration, usd

Row = dict[str, Any]

OF_A_SESSION = (
    "cost_per_session_usd",
    "cost_per_solved_task_usd",
    "solved_tasks_per_hour",
    "session_mean_s",
    "session_p95_s",
    "sessions_per_accelerator",
    "sessions_per_kw",
)


def is_split(row: Row) -> bool:
    """Whether a deployment has more than one pool."""
    return len(topology(row["topology"]).pools) > 1


def split_against_joint(study: Study, families: Sequence[Row]) -> SplitCase | None:
    """The investment case of the cheapest split against the cheapest shared pool; None unless both meet the target.

    At the largest load that meets the SLO the two carry different loads, and there is no such case.
    """
    split = next((row for row in families if is_split(row)), None)
    joint = next((row for row in families if not is_split(row)), None)
    if split is None or joint is None or study.max_load:
        return None
    money = study.written.economics
    return split_case(
        float(joint["cost_per_hour_usd"]),
        float(split["cost_per_hour_usd"]),
        float(split["complexity_usd_per_hour"] - joint["complexity_usd_per_hour"]),
        float(joint["accelerators"]),
        money.split_one_off_usd,
        Horizon(money.horizon_months, money.discount_rate),
    )


def against_api(study: Study, row: Row) -> ApiCase | None:
    """A deployment against the study's API, whose cache holds what a session sent before; None without an API."""
    price = study.api_price
    if price is None:
        return None
    w = study.workload
    new = float(np.asarray(w.resident.mean_tokens))
    reused = max(float(np.asarray(w.mean_prompt)) - new, 0.0)
    call = price.usd_per_call(new, reused, float(np.asarray(w.mean_output)))
    session = call * float(np.asarray(w.calls_per_session))
    return api_case(price, session, float(row["sessions_per_second"]), float(row["cost_per_hour_usd"]))


def economics(study: Study, best: Row | None, families: Sequence[Row]) -> dict[str, Any]:
    """What study.json and the report hold of money: the chosen deployment's, the split's, the API's and the owner's."""
    found: dict[str, Any] = {"per_session": {}, "split": {}, "api": {}, "owning_usd_per_hour": {}}
    if best is not None:
        found["per_session"] = {name: float(best[name]) for name in OF_A_SESSION}
        api = against_api(study, best)
        found["api"] = {} if api is None else api._asdict()
    case = split_against_joint(study, families)
    found["split"] = {} if case is None else {k: _finite(v) for k, v in case._asdict().items()}
    for accelerator, bill in zip(study.accelerators, study.bills, strict=True):
        if bill is not None and study.ownership is not None:
            found["owning_usd_per_hour"][accelerator.id] = bill._asdict() | {
                "server_usd": study.ownership.server_of(accelerator),
                "source": study.ownership.source(accelerator),
            }
    if study.ownership is not None:
        owner = study.ownership
        found["ownership"] = {"profile": owner.name, **owner.numbers, "sources": dict(owner.sources)}
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def sentences(study: Study, best: Row | None, families: Sequence[Row]) -> list[str]:
    """The money in sentences: a session and a task, the split's case, the API's."""
    if best is None:
        return []
    lines = [_session_line(study, best)]
    case = split_against_joint(study, families)
    if case is not None:
        lines.append(_split_line(study, case))
    api = against_api(study, best)
    if api is not None:
        lines.append(_api_line(api, best))
    return lines


def _session_line(study: Study, best: Row) -> str:
    line = f"A session costs {usd(best['cost_per_session_usd'])} USD"
    if study.written.economics.success_rate < 1.0:
        line += f", a solved task {usd(best['cost_per_solved_task_usd'])} USD"
    return line + (
        f", and takes {duration(best['session_mean_s'])} on average, {duration(best['session_p95_s'])} at p95, with "
        f"its tools; {best['sessions_per_accelerator']:,.3g} are in progress per accelerator, "
        f"{best['sessions_per_kw']:,.3g} per kW."
    )


def _split_line(study: Study, case: SplitCase) -> str:
    money = study.written.economics
    gross = case.saving_usd_per_month + case.complexity_usd_per_month
    if abs(gross) < 0.5:
        return "The best split costs the same as the best shared pool, before what running another pool costs."
    if gross <= 0.0:
        return f"The best split costs {usd(-gross)} USD per month more, whatever running it costs."
    line = f"The split saves {usd(gross)} USD per month"
    if case.complexity_usd_per_month:
        line += f" less {usd(case.complexity_usd_per_month)} to run it (assumed)"
    if case.one_off_usd and case.saving_usd_per_month > 0.0:
        line += (
            f"; {usd(case.one_off_usd)} USD to set it up (assumed) come back after {case.payback_months:,.3g} months, "
            f"NPV {usd(case.npv_usd)} USD, ROI {case.roi:.0%}"
        )
    line += f", over {money.horizon_months:g} months at {money.discount_rate:.0%}"
    limit = case.break_even_complexity_usd_per_month
    if limit > 0.0:
        line += f". It pays while running it costs less than {usd(limit)} USD per month"
    else:
        line += ". Setting it up costs more than it ever saves"
    if case.complexity_usd_per_month or case.one_off_usd:
        line += f", from a fleet of {usd(math.ceil(case.break_even_fleet))} accelerators on"
    return line + "."


def _api_line(api: ApiCase, best: Row) -> str:
    share = api.break_even_sessions_per_second / float(best["sessions_per_second"])
    word = "less" if api.ratio < 1.0 else "more"
    return (
        f"The API {api.api} takes {usd(api.api_usd_per_session)} USD per session, {usd(api.api_usd_per_hour)} USD "
        f"per hour at this load: self-hosting costs {api.ratio:.2f} times that, {word}. This fleet breaks even at "
        f"{api.break_even_sessions_per_second:.3g} sessions per second, {share:.0%} of the load."
    )
