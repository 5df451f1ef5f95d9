"""Deployment files: one deployment, with the model, workload and SLO it is judged against, as YAML.

`run` writes best.yaml in this form; people write their own; `explain` reads both, and rows of an output folder.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from breakeven.models.hardware import accelerator, link
from breakeven.models.inputs import InputError, known_fields, pick
from breakeven.models.placement_choices import DEFAULT, stated
from breakeven.models.speculation import NONE, way_id
from breakeven.models.tables import PLAIN_ENCODER
from breakeven.models.tiers import stack
from breakeven.models.topology import COLUMNS, TOPOLOGIES, Topology, topology
from breakeven.models.transfer_ways import FULL, transfer_id
from breakeven.spaces.space import POOL_FIELDS
from breakeven.studies.recorded import is_file
from breakeven.studies.schema import read_yaml
from breakeven.studies.study import ROLES, Study

BEST, FRONT, FAMILIES, RECORD = "best.yaml", "front.csv", "families.csv", "study.json"
_JUDGED_BY = (
    "name",
    "about",
    "llm",
    "kv_kept",
    "engine",
    "local",
    "workload",
    "load",
    "arrivals",
    "slo",
    "prices",
    "catalog",
    "limits",
    "power",
    "economics",
)
_JOINT = ("topology", "kv", "kv_tiers", "link", "routing", "micro_batches", "speculation", "kv_transfer", "encoder",
          "placement")  # fmt: skip
_DEFINED = ("accelerators", "links", "kv_tiers", "speculation", "kv_transfer")
_EXPECTED = ("expected_cost_per_hour_usd", "expected_slo_attainment")


@dataclass(frozen=True)
class Deployed:
    """One deployment as a study whose space has one candidate, and what it is called."""

    study: Study
    title: str


def anchored(data: Mapping[str, Any], file: str) -> dict[str, Any]:
    """A study's mapping with its relative paths made absolute, so that it can be read from anywhere."""
    folder = Path(file).resolve().parent
    out = copy.deepcopy(dict(data))

    def absolute(value: Any) -> Any:
        return str(folder / value) if isinstance(value, str) and (folder / value).exists() else value

    if isinstance(out.get("llm"), dict):
        out["llm"] = {k: absolute(v) if k == "like" else v for k, v in out["llm"].items()}
    else:
        out["llm"] = absolute(out.get("llm"))
    workload = out.get("workload")
    if isinstance(workload, dict):
        files = {"trace", "preset"} if "trace" in workload or is_file(workload.get("preset")) else set[str]()
        out["workload"] = {k: absolute(v) if k in files else v for k, v in workload.items()}
    elif is_file(workload):
        out["workload"] = absolute(workload)
    if "local" in out:
        out["local"] = absolute(out["local"])
    if isinstance(out.get("prices"), dict) and "skypilot" in out["prices"]:
        out["prices"]["skypilot"] = absolute(out["prices"]["skypilot"])
    limits = out.get("limits")
    if isinstance(limits, dict) and isinstance(limits.get("quality"), dict):
        limits["quality"]["table"] = absolute(limits["quality"].get("table"))
    return out


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def choices(row: Mapping[str, Any]) -> dict[str, Any]:
    """The deployment in a row of front.csv: its topology, its pools, and what joins them."""

    def pool(phase: str) -> dict[str, Any]:
        return {name: _plain(row[f"{phase}_{name}"]) for name in POOL_FIELDS if f"{phase}_{name}" in row}

    chosen = topology(row["topology"])
    found: dict[str, Any] = {"topology": chosen.name}
    found |= {name: pool(slot) for name, slot in zip(chosen.pools, pool_slots(chosen), strict=True)}
    found |= {"kv": row["kv"], "kv_tiers": row["kv_tiers"], "routing": row["routing"]}
    if chosen.sides_apart:
        found["micro_batches"] = _plain(row["micro_batches"])
    if row.get("speculation", NONE) != NONE:
        found["speculation"] = row["speculation"]
    if row.get("encoder", PLAIN_ENCODER) != PLAIN_ENCODER:
        found["encoder"] = row["encoder"]
    if chosen.kv_moves and row.get("kv_transfer", FULL) != FULL:
        found["kv_transfer"] = row["kv_transfer"]
    if chosen.sides_apart and row.get("placement", DEFAULT) != DEFAULT:
        found["placement"] = row["placement"]
    return found | ({"link": row["link"]} if len(chosen.pools) > 1 else {})


def pool_slots(chosen: Topology) -> list[str]:
    """The column of front.csv that each pool of a topology stands under, that of an attention stage first."""
    order = ("prefill", "decode", "prefill_ffn", "decode_ffn", "encode")
    return [
        next(slot for slot in order if chosen.labels[COLUMNS.index(slot)] == pool) for pool in range(len(chosen.pools))
    ]


def deployment_yaml(study: Study, row: Mapping[str, Any]) -> str:
    """A deployment file: the choices of a row, and the study's model, workload, SLO and prices."""
    deployment = choices(row)
    deployment["expected_cost_per_hour_usd"] = round(float(row["cost_per_hour_usd"]), 4)
    deployment["expected_slo_attainment"] = round(float(row["slo_attainment"]), 6)
    data = anchored(study.data, study.file)
    judged = {name: data[name] for name in _JUDGED_BY if name in data}
    defined = {k: v for k, v in _definitions(data.get("space", {})).items() if v}
    text = yaml.safe_dump({"deployment": deployment, "study": judged | defined}, sort_keys=False, allow_unicode=True)
    return f"# `breakeven explain {BEST}` shows this deployment term by term.\n{text}"


def _definitions(space: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Accelerators, links and tiers of KV cache that the study itself defines, anywhere in its space."""
    pools = [space, *[space.get(role) or {} for role in ROLES], *(space.get("pools") or {}).values()]
    found: dict[str, list[Any]] = {kind: [] for kind in _DEFINED}
    for pool in pools:
        for kind, rows in found.items():
            given = pool.get(kind) or []
            for spec in given if isinstance(given, list) else [given]:
                if isinstance(spec, dict) and spec not in rows:
                    rows.append(spec)
    return found


def _single(deployment: Any, judged: Mapping[str, Any], definitions: Mapping[str, list[Any]], file: str) -> Study:
    """The study whose space is this one deployment."""
    if not isinstance(deployment, Mapping):
        raise InputError("deployment", deployment, "a mapping: topology, its pools, kv, link, routing", file)
    name = str(deployment.get("topology"))
    try:
        chosen_topology = topology(name)
    except KeyError:
        pick("deployment.topology", deployment.get("topology"), TOPOLOGIES)
        raise
    known_fields(deployment, (*_JOINT, *chosen_topology.pools, *_EXPECTED), "deployment")
    own = {accelerator(spec).id: spec for spec in definitions.get("accelerators", [])}
    links = {link(spec).id: spec for spec in definitions.get("links", [])}
    tiers = {stack(spec).id: spec for spec in definitions.get("kv_tiers", [])}
    ways = {way_id(spec): spec for spec in definitions.get("speculation", [])}
    moves = {transfer_id(spec): spec for spec in definitions.get("kv_transfer", [])}
    space: dict[str, Any] = {"topologies": [name]}
    for pool in chosen_topology.pools:
        given = deployment.get(pool)
        if not isinstance(given, Mapping):
            raise InputError(f"deployment.{pool}", given, f"a mapping of {', '.join(POOL_FIELDS)}", file)
        known_fields(given, POOL_FIELDS, f"deployment.{pool}")
        chosen = {key: value for key, value in given.items() if key != "accelerator"}
        kind = given.get("accelerator")
        chosen["accelerators"] = [own.get(kind, kind) if isinstance(kind, str) else kind]
        space.setdefault("pools", {})[pool] = chosen
    for key, field, own_rows in (
        ("kv", "kv", {}),
        ("kv_tiers", "kv_tiers", tiers),
        ("routing", "routing", {}),
        ("micro_batches", "micro_batches", {}),
        ("speculation", "speculation", ways),
        ("kv_transfer", "kv_transfer", moves),
        ("encoder", "encoder_weights", {}),
        ("link", "links", links),
    ):
        if key in deployment:
            space[field] = [own_rows.get(deployment[key], deployment[key])]
    if "placement" in deployment:
        placed = deployment["placement"]
        space["placement"] = stated(placed) if isinstance(placed, str) else placed
    data = {key: value for key, value in judged.items() if key in _JUDGED_BY}
    kinds = [deployment[pool].get("accelerator") for pool in chosen_topology.pools]
    if isinstance(data.get("catalog"), Mapping):
        data["catalog"] = _used(data["catalog"], kinds, deployment.get("link"))
    for field, per_kind in (("limits", "inventory"), ("prices", "own")):
        given = data.get(field)
        if isinstance(given, Mapping) and isinstance(given.get(per_kind), Mapping):
            data[field] = {**given, per_kind: {k: v for k, v in given[per_kind].items() if k in kinds}}
    return Study.parse({**data, "space": space}, file)


def _used(changes: Mapping[str, Any], accelerators: list[Any], link: Any) -> dict[str, Any]:
    """Of a study's changed catalogue rows those that one deployment uses."""
    used = {"accelerators": accelerators, "links": [link]}
    return {
        kind: {k: v for k, v in rows.items() if k in used[kind]} if kind in used and isinstance(rows, Mapping) else rows
        for kind, rows in changes.items()
    }


def _from_file(path: Path) -> Deployed:
    data = read_yaml(path)
    try:
        known_fields(data, ("deployment", "study"))
        judged = data.get("study")
        if not isinstance(judged, Mapping):
            raise InputError("study", judged, "a mapping: llm, workload, load, slo")
        definitions = {kind: judged.get(kind) or [] for kind in _DEFINED}
        known_fields(judged, (*_JUDGED_BY, *definitions), "study")
        study = _single(data.get("deployment"), {"name": path.stem, **judged}, definitions, str(path))
    except InputError as error:
        raise error.inside(file=str(path)) from None
    return Deployed(study, path.name)


def read_record(folder: Path) -> dict[str, Any]:
    """study.json of an output folder."""
    path = folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        _ = record["study"]["name"], record["file"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            "folder", str(folder), "the output folder of `breakeven run` (study.json is missing or broken)"
        ) from None
    return record


def _from_row(folder: Path, row: str) -> Deployed:
    import pandas as pd

    record = read_record(folder)
    name = FAMILIES if row in TOPOLOGIES else FRONT
    try:
        table = pd.read_csv(folder / name, keep_default_na=False)
    except (OSError, ValueError):
        raise InputError("folder", str(folder), f"{name} cannot be read") from None
    if name == FAMILIES:
        table = table.loc[table["topology"] == row]
        if table.empty:
            raise InputError("row", row, f"a topology of {folder / FAMILIES}: none of it meets the target")
    elif not row.isdigit() or int(row) >= len(table):
        raise InputError("row", row, f"a row of {folder / FRONT}, 0 to {len(table) - 1}, or a topology")
    study = _single(
        choices(table.iloc[0 if name == FAMILIES else int(row)].to_dict()),
        record["study"],
        _definitions(record["study"].get("space", {})),
        str(folder / name),
    )
    return Deployed(study, f"{folder}:{row}")


def read_deployment(target: str, local: Path | None = None) -> Deployed:
    """The deployment that `DEPLOYMENT.yaml`, `DIR` (its best), `DIR:row` (of its front) or `DIR:topology` names.

    `local` is a file of corrections that it takes in place of the one it may name.
    """
    found = _read_deployment(target)
    if local is None:
        return found
    study = found.study
    return Deployed(Study.parse({**study.data, "local": str(local.resolve())}, study.file), found.title)


def _read_deployment(target: str) -> Deployed:
    path = Path(target)
    if path.is_dir():
        read_record(path)
        if not (path / BEST).exists():
            raise InputError("folder", target, f"it has no {BEST}: nothing met the target; name a row, as {target}:0")
        return _from_file(path / BEST)
    folder, colon, row = target.rpartition(":")
    if colon and Path(folder).is_dir():
        return _from_row(Path(folder), row)
    if not path.exists():
        raise InputError("deployment", target, "a deployment file, an output folder, or FOLDER:ROW")
    return _from_file(path)
