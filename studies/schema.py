"""The study file: its fields, checked one by one; every fault is one line that names file, field and value."""

import difflib
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from breakeven.models.inputs import InputError
from breakeven.models.topology import PLAIN
from breakeven.optimizer.front import OBJECTIVES

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Dollars = Annotated[float, Field(ge=0, le=1e12)]
Seconds = Annotated[float, Field(gt=0, le=1e7)]
MAX_VALUES = 1000


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Range(_Strict):
    """Whole numbers from `from` to `to`, every `step`-th."""

    start: Annotated[int, Field(ge=1, alias="from")]
    to: Annotated[int, Field(ge=1, le=100000)]
    step: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _not_empty(self) -> "Range":
        if self.to < self.start:
            raise ValueError(f"`to` must be at least `from` ({self.start})")
        if (self.to - self.start) // self.step >= MAX_VALUES:
            raise ValueError(f"at most {MAX_VALUES} values")
        return self

    def values(self) -> list[int]:
        return list(range(self.start, self.to + 1, self.step))


Count = Annotated[int, Field(ge=1, le=1_000_000)]
Counts = Annotated[list[Count], Field(min_length=1, max_length=MAX_VALUES)] | Range | Count
Named = Annotated[list[str | dict[str, Any]], Field(min_length=1)] | str | dict[str, Any]
Names = Annotated[list[str], Field(min_length=1)] | str
Flags = Annotated[list[bool], Field(min_length=1)] | bool


class PoolChoices(_Strict):
    """Choices of a pool; a list is searched, a single value is fixed, None is inherited."""

    accelerators: Named | None = None
    tensor_parallel: Counts | None = None
    data_parallel: Counts | None = None
    expert_parallel: Flags | None = None
    pipeline_parallel: Counts | None = None
    context_parallel: Counts | None = None
    replicas: Counts | None = None
    max_batch: Counts | None = None
    token_budget: Counts | None = None
    weights: Names | None = None


class SpaceChoices(PoolChoices):
    """What may be chosen. `prefill` and `decode` override the choices of pools that do one of them, `shared` of those
    that do both, `attention` and `ffn` of pools of one side, `encode` of a vision encoder's own, `pools` those of a
    pool by its name."""

    topologies: Names = Field(default_factory=lambda: list(PLAIN))
    micro_batches: Counts = Field(default_factory=lambda: [1, 2, 3])
    kv: Names = "bf16"
    kv_tiers: Named = "none"
    speculation: Named = "none"
    kv_transfer: Named = "full"
    encoder_weights: Names = "bf16"
    placement: Any = Field(default_factory=dict)  # of parts on either side of an attention/FFN split
    links: Named = "ib-ndr-400"
    routing: Names = "affinity"
    shared: PoolChoices = PoolChoices()
    encode: PoolChoices = PoolChoices()
    prefill: PoolChoices = PoolChoices()
    decode: PoolChoices = PoolChoices()
    attention: PoolChoices = PoolChoices()
    ffn: PoolChoices = PoolChoices()
    pools: dict[str, PoolChoices] = Field(default_factory=dict)


class BoundFields(_Strict):
    """A bound and the fraction that must meet it alone."""

    bound: Seconds
    fraction: Share = 0.0


class SloFields(_Strict):
    """Bounds in seconds; `target` is the fraction of calls (or sessions) that must meet all of them jointly."""

    ttft_s: Seconds | BoundFields | None = None
    tpot_s: Seconds | BoundFields | None = None
    call_s: Seconds | BoundFields | None = None
    session_s: Seconds | BoundFields | None = None
    target: Annotated[float, Field(gt=0, le=1)] = 0.95
    per: Literal["call", "session"] = "call"

    @model_validator(mode="after")
    def _some_bound(self) -> "SloFields":
        if not any((self.ttft_s, self.tpot_s, self.call_s, self.session_s)):
            raise ValueError("at least one of ttft_s, tpot_s, call_s, session_s")
        return self


class PeakFields(_Strict):
    """Hours in which the tokens to prefill, or to generate, are so many times the usual, the others being as usual."""

    prefill: Annotated[float, Field(ge=1, le=100)] = 1.0
    decode: Annotated[float, Field(ge=1, le=100)] = 1.0


class Load(_Strict):
    """How much work comes: exactly one of the three rates; and what it peaks at."""

    sessions_per_second: Annotated[float, Field(gt=0, le=1e6)] | None = None
    calls_per_second: Annotated[float, Field(gt=0, le=1e7)] | None = None
    concurrent_sessions: Annotated[float, Field(ge=1, le=1e8)] | None = None
    peaks: PeakFields | None = None  # of prefill and of decode, each on its own

    @model_validator(mode="after")
    def _exactly_one(self) -> "Load":
        given = [v for v in (self.sessions_per_second, self.calls_per_second, self.concurrent_sessions) if v]
        if len(given) != 1:
            raise ValueError("exactly one of sessions_per_second, calls_per_second, concurrent_sessions")
        return self


class Arrivals(_Strict):
    """Session arrivals: a renewal process with gamma intervals of this coefficient of variation (1 is Poisson)."""

    cv: Annotated[float, Field(gt=0, le=20)]


class SpotFields(_Strict):
    """What interruptions cost on spot: accelerators held beside those that are away."""

    interruptions_per_month: Annotated[float, Field(ge=0, le=1e5)] = 0.15  # AWS advisor, p5: 10 to 20 % a month
    recovery_s: Annotated[float, Field(ge=0, le=1e7)] = 900.0  # until a replacement serves; an assumption


class PriceFields(_Strict):
    """Which price of the catalogue applies, and one's own prices per accelerator and hour."""

    term: Literal["on-demand", "spot", "committed-1y", "committed-3y", "owning"] = "on-demand"
    provider: str = "median"
    own: dict[str, Annotated[float, Field(ge=0, le=1e6)]] = Field(default_factory=dict)
    skypilot: str | None = None
    whole_instances: bool = False
    pool_usd_per_month: Dollars = 0.0  # running cost of each pool beyond the first
    second_kind_usd_per_month: Dollars = 0.0  # and of each kind of accelerator beyond the first
    spot: SpotFields = SpotFields()


class KeptFields(_Strict):
    """A KV cache of the first tokens of a sequence and a window of the last."""

    sinks: Annotated[int, Field(ge=0, le=10_000)] = 4
    window: Annotated[int, Field(ge=16, le=10_000_000)]


class QualityFields(_Strict):
    """Least score that the formats of weights and KV cache must have in a table."""

    table: str  # a CSV file: weights, kv, score; with llm, of several models
    at_least: float


class Limits(_Strict):
    """What a fleet may cost, draw and consist of, how good its formats are, and whether it must run today."""

    budget_usd_per_hour: Positive | None = None
    max_power_kw: Positive | None = None
    inventory: dict[str, Annotated[int, Field(ge=0, le=10_000_000)]] | None = None
    lost_replicas: Annotated[int, Field(ge=0, le=1000)] = 0  # that any one pool may lose while the target still holds
    quality: QualityFields | None = None
    deployable: Literal["any", "today"] = "any"  # today: only what the study's engine supports (support.toml)


class EconomicsFields(_Strict):
    """Owning instead of renting, what a split must bring, what a solved task is, and an API to compare with."""

    ownership: str | dict[str, Any] | None = None  # a profile of ownership.toml, or a variation
    split_one_off_usd: Dollars = 0.0  # engineering until a split runs
    horizon_months: Annotated[float, Field(gt=0, le=1200)] = 36.0
    discount_rate: Share = 0.10  # per year
    success_rate: Annotated[float, Field(gt=0, le=1)] = 1.0  # sessions that solve their task
    api: str | dict[str, Any] | None = None  # a row of api_prices.toml, or prices per million tokens


class SearchFields(_Strict):
    """How the space is searched."""

    method: Literal["auto", "exhaustive", "optuna"] = "auto"
    trials: Annotated[int, Field(ge=1, le=10_000_000)] = 2000
    trial: Literal["structure", "candidate"] = "structure"  # what one trial of an Optuna search judges
    sampler: Literal["nsga2", "nsga3", "tpe", "gp", "qmc", "random"] = "nsga2"
    seconds: Seconds | None = None  # after which an Optuna search asks for no more trials
    early_stop: bool = True  # when the front no longer moves
    refine: bool = False  # replicas, batches and token budgets by gradients, at the end of an Optuna search
    warm_start: str | None = None  # output folder of an earlier run, whose front is tried first
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    verify: bool = True  # simulate the front and the cheapest that meet the target


class Spread(_Strict):
    """A factor on an input: lognormal with mean 1 and this coefficient of variation, or even from `low` to `high`."""

    cv: Annotated[float, Field(gt=0, le=3)] | None = None
    low: Annotated[float, Field(gt=0, le=100)] | None = None
    high: Annotated[float, Field(gt=0, le=100)] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> "Spread":
        even = self.low is not None and self.high is not None and self.low <= self.high
        if even == (self.cv is not None) or (self.low is None) != (self.high is None):
            raise ValueError("either cv, or low and high")
        return self


class Uncertain(_Strict):
    """What is not known for sure, and whether the search ranks by the usual values or by a quantile over draws."""

    load: Spread | None = None
    prices: Spread | None = None  # of each accelerator on its own
    efficiency: Spread | None = None  # achieved shares of the peaks
    tool_time: Spread | None = None  # gaps between calls
    objective: Literal["nominal", "robust"] = "nominal"
    quantile: Annotated[float, Field(gt=0.5, lt=1)] = 0.9
    draws: Annotated[int, Field(ge=10, le=100_000)] = 200  # of the front
    search_draws: Annotated[int, Field(ge=4, le=1000)] = 16  # of every candidate of a robust search

    @model_validator(mode="after")
    def _something(self) -> "Uncertain":
        if not any((self.load, self.prices, self.efficiency, self.tool_time)):
            raise ValueError("at least one of load, prices, efficiency, tool_time")
        return self


class MixedFields(_Strict):
    """Two cells with unlike accelerators: which shares of the sessions one of them may get, the other the rest."""

    shares: Annotated[list[Annotated[float, Field(ge=0.01, le=0.99)]], Field(min_length=1, max_length=50)] = Field(
        default_factory=lambda: [0.25, 0.5]
    )


class Power(_Strict):
    """Assumptions of the energy column."""

    idle_share: Share = 0.3
    pue: Annotated[float, Field(ge=1, le=5)] = 1.3


class CatalogChanges(_Strict):
    """Numbers of catalogue rows that this study sees differently, by id: fields as in a variation of the row."""

    accelerators: dict[str, dict[str, Any]] = Field(default_factory=dict)
    links: dict[str, dict[str, Any]] = Field(default_factory=dict)


class StudyFile(_Strict):
    """A study file, as written."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    about: str = ""
    llm: str | dict[str, Any]
    kv_kept: Annotated[float, Field(gt=0, le=1)] | KeptFields = 1.0  # of a sequence: a fraction, or sinks and a window
    engine: str | dict[str, Any] = "vllm"
    local: str | None = None  # corrections that `calibrate --local` wrote
    workload: str | dict[str, Any]
    load: Load | Literal["max"]
    arrivals: Literal["poisson"] | Arrivals = "poisson"
    slo: SloFields
    space: SpaceChoices
    prices: PriceFields = PriceFields()
    catalog: CatalogChanges = CatalogChanges()
    limits: Limits = Limits()
    power: Power = Power()
    economics: EconomicsFields = EconomicsFields()
    objectives: Annotated[list[str], Field(min_length=2, max_length=4)] = Field(
        default_factory=lambda: ["cost_per_hour_usd", "slo_attainment"]
    )
    search: SearchFields = SearchFields()
    uncertain: Uncertain | None = None
    mixed: MixedFields | None = None

    @model_validator(mode="after")
    def _known_objectives(self) -> "StudyFile":
        for i, name in enumerate(self.objectives):
            if name not in OBJECTIVES:
                raise InputError(f"objectives.{i}", name, _closest(name, OBJECTIVES))
        if self.load == "max" and self.uncertain and self.uncertain.load:
            raise InputError("uncertain.load", "given", "nothing with `load: max`: the load is what is searched for")
        if len(set(self.objectives)) != len(self.objectives):
            raise InputError("objectives", self.objectives, "each objective once")
        return self

    @model_validator(mode="after")
    def _sums_over_cells(self) -> "StudyFile":
        """With `mixed`, only what adds up over its cells."""
        if self.mixed is None:
            return self
        for field, value, allowed in self._not_summed(self.mixed.shares):
            raise InputError(field, value, f"{allowed} with `mixed`")
        return self

    def _not_summed(self, shares: list[float]) -> Iterator[tuple[str, object, str]]:
        """(field, value, what is allowed) of what the cells of a mix do not add up to."""
        if self.load == "max":
            yield "load", "max", "a stated load"
        if not set(self.objectives) <= {"cost_per_hour_usd", "slo_attainment"}:
            yield "objectives", self.objectives, "cost_per_hour_usd and slo_attainment"
        if self.uncertain and self.uncertain.objective == "robust":
            yield "uncertain.objective", "robust", "nominal"
        if not isinstance(self.load, str) and self.load.peaks:
            yield "load.peaks", self.load.peaks.model_dump(), "no peaks"
        if self.limits.lost_replicas:
            yield "limits.lost_replicas", self.limits.lost_replicas, "0"
        for name in ("ttft_s", "tpot_s", "call_s", "session_s"):
            bound = getattr(self.slo, name)
            if isinstance(bound, BoundFields) and bound.fraction > 0.0:
                yield f"slo.{name}.fraction", bound.fraction, "0"
        sessions = None if self.load == "max" else self.load.concurrent_sessions
        if sessions and min(*shares, *[1.0 - share for share in shares]) * sessions < 1.0:
            yield "mixed.shares", shares, f"at least one of the {sessions:g} sessions in each cell"


def _closest(name: str, choices: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(choices), n=2, cutoff=0.5)
    return f"unknown; did you mean {' or '.join(close)}?" if close else "unknown; one of " + ", ".join(choices)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; InputError when it cannot be read or is none."""
    file = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError("file", file, f"cannot be read: {reason}") from None
    return parse_yaml(text, file)


def parse_yaml(text: str, file: str) -> dict[str, Any]:
    """The mapping in YAML text."""
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or "is no valid YAML"
        raise InputError("file", Path(file).name, f"{line}{problem}", file) from None
    if not isinstance(data, dict):
        raise InputError("file", Path(file).name, "a mapping of fields such as name, llm, workload, slo, space", file)
    return data


def set_path(data: dict[str, Any], assignment: str) -> None:
    """Apply `PATH=VALUE` (a dotted path, a YAML value) to nested mappings and lists in place."""
    path, equals, text = assignment.partition("=")
    if not equals or not path:
        raise InputError("--set", assignment, "PATH=VALUE, for instance slo.target=0.99")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        raise InputError("--set", assignment, "VALUE must be YAML") from None
    set_value(data, path, value)


def set_value(data: dict[str, Any], path: str, value: Any) -> None:
    """Put a value at a dotted path of nested mappings and lists, in place."""
    *parents, last = split_path(path)
    node: Any = data
    for i, key in enumerate(parents):
        if isinstance(node, list):
            node = node[_index(key, node, path)]
        elif isinstance(node, dict):
            if not isinstance(node.get(key), dict | list):
                node[key] = {_main_field(key): node[key]} if isinstance(node.get(key), str) else {}
            node = node[key]
        else:
            raise InputError("--set", path, f"{'.'.join(parents[: i + 1])} is no mapping")
    if isinstance(node, list):
        node[_index(last, node, path)] = value
    elif isinstance(node, dict):
        if isinstance(node.get(last), dict) and "bound" in node[last] and not isinstance(value, dict):
            node[last] = {**node[last], "bound": value}  # an SLO's bound keeps its fraction
        else:
            node[last] = value
    else:
        raise InputError("--set", path, f"{'.'.join(parents)} is no mapping")


def split_path(path: str) -> list[str]:
    """The steps of a dotted path; `links.ID.FIELD` and `accelerators.ID.FIELD` are rows of the catalogue.

    >>> split_path("links.cxl-2.0-x8.bandwidth")
    ['catalog', 'links', 'cxl-2.0-x8', 'bandwidth']
    """
    steps = path.removeprefix("catalog.").split(".")
    if steps[0] in ("links", "accelerators") and len(steps) > 2:
        return ["catalog", steps[0], ".".join(steps[1:-1]), steps[-1]]
    return path.split(".")


def _main_field(key: str) -> str:
    """What a name alone stands for when a field beside it is set: `llm: x` is `llm: {like: x}`."""
    return "preset" if key == "workload" else "like"


def _index(key: str, node: list[Any], path: str) -> int:
    if not key.isdigit() or int(key) >= len(node):
        raise InputError("--set", path, f"{key} is no position in a list of {len(node)}")
    return int(key)


def parse_study(data: dict[str, Any], file: str) -> StudyFile:
    """The study in `data`; the first fault as an InputError."""
    try:
        return StudyFile.model_validate(data)
    except ValidationError as error:
        raise _as_input_error(error, data, file) from None


def _as_input_error(error: ValidationError, data: dict[str, Any], file: str) -> InputError:
    """The fault that lies deepest: of several alternatives of a field, the one that went furthest."""
    faults = error.errors(include_url=False)
    for cause in (fault.get("ctx", {}).get("error") for fault in faults):
        if isinstance(cause, InputError):  # of a rule over several fields, once each holds by itself
            return cause.inside(file=file)
    unknown = [fault for fault in faults if fault["type"] == "extra_forbidden"]
    fault = max(unknown or faults, key=lambda f: len(_path(f["loc"], data)))
    path = _path(fault["loc"], data)
    field = ".".join(str(part) for part in path) or "study"
    same = [f for f in faults if _path(f["loc"], data) == path]
    if fault["type"] == "extra_forbidden":
        allowed = _fields_at(path[:-1])
        return InputError(field, fault["input"], "unknown field; " + _closest(str(path[-1]), allowed)[9:], file)
    if fault["type"] == "missing":
        return InputError(field, None, "is required", file)
    words = list(dict.fromkeys(_words(f["msg"]) for f in same))
    return InputError(field, fault["input"], " or ".join(words), file)


def _words(message: str) -> str:
    text = message.removeprefix("Value error, ").removeprefix("Input should be ")
    text = re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping of fields", text)
    text = re.sub(r"List should have (at (?:least|most) \d+) items? after validation, not \d+", r"a list of \1", text)
    return text[:1].lower() + text[1:]


def _path(location: tuple[int | str, ...], data: Any) -> tuple[int | str, ...]:
    """A pydantic location without the names of the alternatives it tried: only steps that exist in the data."""
    path: list[int | str] = []
    node = data
    for i, part in enumerate(location):
        if (isinstance(node, dict) and part in node) or (isinstance(node, list) and isinstance(part, int)):
            path.append(part)
            node = node[part]  # type: ignore[index]
        elif isinstance(node, dict) and i == len(location) - 1 and str(part).replace("_", "").isalpha():
            path.append(part)
    return tuple(path)


def _fields_at(path: tuple[int | str, ...]) -> list[str]:
    """Names of the fields that the study has at `path`."""
    model: type[BaseModel] = StudyFile
    for part in path:
        found = model.model_fields.get(str(part))
        inner = [m for m in _models(found.annotation) if m is not None] if found else []
        if not inner:
            return sorted(model.model_fields)
        model = inner[0]
    return [field.alias or name for name, field in model.model_fields.items()]


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, Annotated):
        return [m for a in typing.get_args(annotation) for m in _models(a)]
    return []
