"""The inputs of a deployment, with the ranges they are taken to lie in: workload, SLO, hardware, prices, fits."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from breakeven.models.inputs import InputError, number
from breakeven.models.kernel_curves import OPERATORS
from breakeven.models.tables import Engine
from breakeven.models.variation import KV, PEAKS, WEIGHTS, WORKLOAD_INPUTS, Input
from breakeven.studies.study import Study

_HARDWARE = {
    "compute": PEAKS,
    "memory_bandwidth": ("memory_bandwidth_bytes_per_s",),
    "memory": ("memory_bytes",),
    "scaleup": ("scaleup_bytes_per_s", "scaleup_pair_bytes_per_s"),
    "nic": ("nic_bytes_per_s",),
    "price": ("usd_per_hour",),
}
_SLO = ("ttft", "tpot", "call", "session")


def used(row: Mapping[str, Any]) -> tuple[list[str], str]:
    """(accelerators, link) of a deployment; no link where there is one pool."""
    return list(dict.fromkeys((row["prefill_accelerator"], row["decode_accelerator"]))), str(row["link"])


def inputs_of(study: Study, rows: Sequence[Mapping[str, Any]]) -> tuple[Input, ...]:
    """Every input that the deployments in `rows` depend on and that is not zero."""
    accelerators = list(dict.fromkeys(name for row in rows for name in used(row)[0]))
    links = list(dict.fromkeys(used(row)[1] for row in rows if used(row)[1]))
    return (
        *_of_workload(study),
        *[Input(f"slo.{n}_s", "slo", (n,)) for n in _SLO if getattr(study.slo, n) is not None],
        *[each for name in accelerators for each in _of_accelerator(study, name)],
        *[each for name in links for each in _of_link(study, name)],
        Input("llm.parameters", "llm", WEIGHTS),
        Input("llm.kv_bytes_per_token", "llm", KV),
        *_of_engine(study),
        *_of_economy(study),
    )


def _of_workload(study: Study) -> list[Input]:
    load = next(iter(study.written.load.model_dump(exclude_none=True)))  # type: ignore[union-attr]
    names = [name for name in WORKLOAD_INPUTS if name != "gaps" or float(study.workload.calls_per_session) > 1.0]
    return [Input(f"load.{load}", "workload", ("load",)), *[Input(f"workload.{n}", "workload", (n,)) for n in names]]


def _of_accelerator(study: Study, name: str) -> list[Input]:
    row = study.names.accelerator_ids.index(name)
    hardware = study.catalog.hardware
    found = [
        Input(f"accelerators.{name}.{what}", "hardware", fields, row)
        for what, fields in _HARDWARE.items()
        if any(float(np.asarray(getattr(hardware, field))[row]) > 0.0 for field in fields)
    ]
    return found + [Input(f"kernels.{name}.{operator}", "kernels", (operator,), row) for operator in OPERATORS]


def _of_link(study: Study, name: str) -> list[Input]:
    row = [link.id for link in study.names.links].index(name)
    found = [Input(f"links.{name}.bandwidth", "links", ("bytes_per_s",), row)]
    if study.names.links[row].latency_s > 0.0:
        found.append(Input(f"links.{name}.latency_us", "links", ("latency_s",), row))
    return found


def _of_engine(study: Study) -> list[Input]:
    engine = study.catalog.engine
    names = [name for name in Engine.__dataclass_fields__ if float(getattr(engine, name) or 0.0) > 0.0]
    return [Input(f"engine.{name}", "engine", (name,)) for name in names if name != "burst_factor"]


def _of_economy(study: Study) -> list[Input]:
    economy = study.catalog.economy
    names = {
        "pool_usd_per_hour": "prices.pool_usd_per_month",
        "second_kind_usd_per_hour": "prices.second_kind_usd_per_month",
    }
    return [Input(path, "economy", (name,)) for name, path in names.items() if float(getattr(economy, name)) > 0.0]


def with_ranges(inputs: Sequence[Input], given: Sequence[str]) -> tuple[Input, ...]:
    """The inputs, those named by `PATH=low:high` with these factors as their range."""
    ranges: dict[str, tuple[float, float]] = {}
    paths = [each.path for each in inputs]
    for text in given:
        path, _, ends = text.partition("=")
        low, colon, high = ends.partition(":")
        if path not in paths or not colon:
            raise InputError("--range", text, "PATH=low:high, two factors, of " + ", ".join(paths[:12]) + ", …")
        try:
            values = float(low), float(high)
        except ValueError:
            raise InputError("--range", text, "PATH=low:high, two factors") from None
        ranges[path] = number(f"--range {path}", values[0], 0.01, 1.0), number(f"--range {path}", values[1], 1.0, 100.0)
    return tuple(
        Input(e.path, e.part, e.fields, e.row, *ranges.get(e.path, (e.low, e.high))) for e in inputs
    )  # fmt: skip
