"""Axes over a study's fields: `PATH=a:b:n` or `PATH=v1,v2,…`, what stands there now, and the studies at values."""

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import yaml

from breakeven.models.catalog import table
from breakeven.models.inputs import InputError, number
from breakeven.models.sessions import SCALABLE
from breakeven.models.tables import engine_row
from breakeven.studies.schema import Load, parse_study, set_value, split_path
from breakeven.studies.study import Study

Value = float | int | str | bool | None
MOST_POINTS = 200

_FACTORS = ("compute", "memory_bandwidth", "scaleup", "nic", "price", "bandwidth")
_UNITS = {
    "_s": "s",
    "_tokens": "tokens",
    "_gbs": "GB/s",
    "_gbps": "Gbit/s",
    "_us": "µs",
    "_gib": "GiB",
    "_tflops": "TFLOP/s",
    "_tops": "TOP/s",
    "_kw": "kW",
    "_w": "W",
    "_usd_per_hour": "USD/h",
    "_usd_per_month": "USD/month",
    "_fraction": "share",
    "_probability": "share",
    "_per_second": "per s",
}


@dataclass(frozen=True)
class Axis:
    """A field of the study and the values it takes."""

    path: str
    values: tuple[Value, ...]
    current: float | None  # what the study says there, where that is a number
    geometric: bool = False

    @property
    def numeric(self) -> bool:
        return all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.values)

    @property
    def numbers(self) -> np.ndarray:
        return np.array(self.values, float)

    @property
    def unit(self) -> str:
        return unit(self.path)

    @property
    def label(self) -> str:
        """The path with its unit, as an axis of a plot shows it."""
        return f"{self.path}, {self.unit}" if self.unit else self.path


def unit(path: str) -> str:
    """The unit of a field, told from its name; empty where it has none."""
    steps = split_path(path)
    if steps[-1] in _FACTORS and steps[0] in ("catalog", "space"):
        return "× the catalogue's"
    if len(steps) > 2 and steps[-2] == "scale":
        return "× the workload's"
    return next((words for end, words in _UNITS.items() if f"_{steps[-1]}".endswith(end)), "")


def read_axis(text: str, study: Study, option: str) -> Axis:
    """The axis that `PATH=a:b:n`, `PATH=a:b:n:log` or `PATH=v1,v2,…` describes; a number `x2` is twice the study's."""
    path, equals, values = text.partition("=")
    if not equals or not path or not values:
        raise InputError(option, text, "PATH=a:b:n, PATH=a:b:n:log or PATH=v1,v2,…, for instance slo.ttft_s=0.5:4:8")
    path = full_path(path, study)
    now = current(study, path)
    parts = values.split(":")
    geometric = len(parts) == 4 and parts[3] == "log"
    if len(parts) == 3 or geometric:
        start, stop = (_number(part, now, path, option) for part in parts[:2])
        count = int(number(f"{option} {path}", _parsed(parts[2], option), 2, MOST_POINTS, whole=True))
        if geometric and (start <= 0.0 or stop <= 0.0):
            raise InputError(f"{option} {path}", values, "positive ends, for geometric steps")
        spaced = np.geomspace(start, stop, count) if geometric else np.linspace(start, stop, count)
        if start >= stop:
            raise InputError(f"{option} {path}", values, "a first end below the second")
        found = _whole_where(study, path, spaced)
        return Axis(path, found, now, geometric)
    if len(parts) != 1:
        raise InputError(option, text, "PATH=a:b:n, PATH=a:b:n:log or PATH=v1,v2,…")
    listed = tuple(_value(part, now, path, option) for part in _split(values))
    if len(listed) > MOST_POINTS or len(set(map(str, listed))) < len(listed):
        raise InputError(f"{option} {path}", values, f"at most {MOST_POINTS} different values")
    return Axis(path, listed, now, _is_geometric(listed))


def _is_geometric(values: Sequence[Value]) -> bool:
    """Whether listed numbers rise by factors rather than by steps."""
    if len(values) < 3 or not all(isinstance(v, int | float) and v > 0 for v in values):
        return False
    numbers = np.array(values, float)
    return bool(np.std(np.diff(np.log(numbers))) < 0.5 * np.std(np.diff(numbers)) / np.mean(np.abs(numbers)))


def _split(text: str) -> list[str]:
    """Parts between commas that stand in no bracket."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _parsed(text: str, option: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise InputError(option, text, "VALUE must be YAML") from None


def _value(text: str, now: float | None, path: str, option: str) -> Value:
    if text.startswith("x") and text[1:].replace(".", "", 1).isdigit():
        return _number(text, now, path, option)
    return _parsed(text, option)


def _number(text: str, now: float | None, path: str, option: str) -> float:
    """A number, or `x2`: that multiple of what the study says."""
    times = text.startswith("x")
    value = _parsed(text[1:] if times else text, option)
    if isinstance(value, str):  # YAML 1.1 reads 1e-3 as text
        try:
            value = float(value)
        except ValueError:
            raise InputError(f"{option} {path}", text, "a number, or x2 for twice the study's") from None
    value = number(f"{option} {path}", value, -1e15, 1e15)
    if not times:
        return value
    if now is None:
        raise InputError(f"{option} {path}", text, "a number of its own: the study states none there")
    return value * now


def _whole_where(study: Study, path: str, values: np.ndarray) -> tuple[Value, ...]:
    """Evenly spaced values; rounded and each once where the study has whole numbers there."""
    now = _stated(study, path)
    whole = isinstance(now, int) and not isinstance(now, bool) and split_path(path)[0] in ("space", "search")
    if whole:
        return tuple(dict.fromkeys(int(v) for v in np.rint(values)))
    return tuple(float(f"{v:.6g}") for v in values)


def full_path(path: str, study: Study) -> str:
    """`load` alone is the field of the load that the study states."""
    if path == "load" and isinstance(study.written.load, Load):
        given = study.written.load.model_dump(exclude_none=True)
        return f"load.{next(iter(given))}"
    return path


def _stated(study: Study, path: str) -> Any:
    """What the study says at a path, itself or by default; None where it says nothing."""
    node: Any = study.written
    for step in split_path(path):
        if isinstance(node, dict):
            node = node.get(step)
        elif isinstance(node, list):
            node = node[int(step)] if step.isdigit() and int(step) < len(node) else None
        else:
            node = getattr(node, step, None)
    return node


def current(study: Study, path: str) -> float | None:
    """The number that stands at a path now: the study's, or that of the catalogue behind it."""
    stated = _stated(study, path)
    if stated is None:
        stated = _behind(study, split_path(path))
    if hasattr(stated, "bound"):
        stated = stated.bound
    return float(stated) if isinstance(stated, int | float) and not isinstance(stated, bool) else None


def _behind(study: Study, steps: list[str]) -> Any:
    """What the catalogue says where the study is silent."""
    if steps[0] == "catalog" and len(steps) == 4:
        return _of_row(study, *steps[1:])
    if steps[0] == "workload" and not study.recorded:
        if steps[1:2] == ["scale"]:
            return 1.0 if steps[-1] in SCALABLE else None
        return getattr(study.session_spec, steps[-1], None) if len(steps) == 2 else None
    if steps[0] == "engine" and len(steps) == 2:
        spec = study.written.engine
        name = spec if isinstance(spec, str) else spec.get("like", "vllm")
        return engine_row(name).get(steps[1]) if name in table("engines") else None
    return None


def _of_row(study: Study, kind: str, name: str, last: str) -> Any:
    """A number of a catalogue row; 1 for a factor."""
    if last in _FACTORS:
        return 1.0
    if kind == "links":
        row = next((row for row in study.names.links if row.id == name), None)
        return None if row is None else {"gbs": row.bytes_per_s / 1e9, "latency_us": row.latency_s * 1e6}.get(last)
    return table("accelerators").get(name, {}).get(last)


# Which fields of the study each of its resolved parts depends on: a part is made once for all that agree in them.
_PARTS = {
    "architecture": ("llm",),
    "session_spec": ("workload",),
    "recorded": ("workload",),
    "accelerators": ("space", "catalog"),
    "names": ("space", "catalog"),
    "space": ("llm", "space", "catalog"),
    "bills": ("space", "catalog", "prices", "economics"),
    "prices_usd_per_hour": ("space", "catalog", "prices", "economics"),
    "catalog": ("llm", "engine", "space", "catalog", "prices", "economics", "limits", "power", "local"),
    "workload": ("llm", "workload", "load", "arrivals"),
    "slo": ("slo",),
}


@dataclass
class Variations:
    """Studies that differ from one in a few fields; what they have in common is resolved once."""

    study: Study
    _parts: dict[tuple[str, ...], Any] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)

    def at(self, changes: dict[str, Value]) -> Study:
        """The study with these fields changed. Raises InputError."""
        data = copy.deepcopy(self.study.data)
        for path, value in changes.items():
            set_value(data, path, value)
        made = Study(parse_study(data, self.study.file), data, self.study.file)
        try:
            for name, depends in _PARTS.items():
                if name == "session_spec" and made.recorded is not None:
                    continue
                key = (name, *[repr(getattr(made.written, each)) for each in depends])
                if key not in self._parts:
                    value = getattr(made, name)
                    with self._lock:
                        self._parts.setdefault(key, value)
                made.__dict__[name] = self._parts[key]
        except InputError as error:
            raise error.inside(file=self.study.file) from None
        return made
