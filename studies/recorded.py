"""Workloads that stand in files: `{trace: FILE, format: …}` is replayed, `FILE.yaml` holds a workload's fields."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from breakeven.models.inputs import InputError, known_fields, number, pick
from breakeven.models.sessions import Sessions
from breakeven.models.traces import Options, Trace, fit_window, inferences, read_trace, trace_sessions
from breakeven.models.traces.table import FIELDS as COLUMNS
from breakeven.studies.schema import read_yaml

FIELDS = (
    "trace",
    "format",
    "skip_bad_rows",
    "block_tokens",
    "time_unit",
    "subagents",
    "columns",
    "shared_prefix_tokens",
)


@dataclass(frozen=True)
class Recorded:
    """A trace as a study's workload."""

    name: str
    trace: Trace
    shared_prefix_tokens: float | None

    def sessions(self, max_context: float) -> Sessions:
        """Its sessions on a model of `max_context` tokens."""
        return fit_window(trace_sessions(self.trace, self.shared_prefix_tokens), max_context)[0]

    def notes(self, max_context: float) -> list[str]:
        """What was read, inferred, left out and cut."""
        notes = [self.trace.summary(), *self.trace.reading.lines()]
        notes += [f"inferred: {text}" for text in inferences(self.trace, self.shared_prefix_tokens)]
        cut = fit_window(trace_sessions(self.trace, self.shared_prefix_tokens), max_context)[1]
        return notes + ([f"cut: {cut:,} prompts, to the model's {max_context:,.0f} tokens"] if cut else [])


def recorded(given: object, folder: Path) -> Recorded | None:
    """The trace that a study's workload names (relative to `folder`), or None when it names none."""
    if not isinstance(given, Mapping) or "trace" not in given:
        return None
    file = given["trace"]
    if not isinstance(file, str):
        raise InputError("workload.trace", file, "a trace file, relative to the study")
    path = folder / file
    if not path.exists():
        raise InputError("workload.trace", file, "no such file")
    try:
        return read_recorded(given, path)
    except InputError as error:
        raise error if error.file else error.inside("workload") from None


def read_recorded(given: Mapping[str, Any], path: Path) -> Recorded:
    """The trace in `path`, read as the fields `given` say."""
    known_fields(given, FIELDS)
    prefix = given.get("shared_prefix_tokens")
    shared = None if prefix is None else number("shared_prefix_tokens", prefix, 0.0, 1e7)
    return Recorded(path.name, read_trace(path, _name(given.get("format")), options(given)), shared)


def _name(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InputError("format", value, "a format's name")
    return value


def options(given: Mapping[str, Any]) -> Options:
    """How to read a trace, from fields of a study."""
    columns = given.get("columns") or {}
    if not isinstance(columns, Mapping) or not all(isinstance(v, str) for v in columns.values()):
        raise InputError("columns", columns, "a mapping of our fields to columns")
    flags = {name: given.get(name, default) for name, default in (("skip_bad_rows", False), ("subagents", True))}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InputError(name, value, "true or false")
    unit = given.get("time_unit")
    return Options(
        **flags,
        block_tokens=int(number("block_tokens", given.get("block_tokens", 512), 1, 1e6, whole=True)),
        time_unit=None if unit is None else pick("time_unit", unit, ("s", "ms", "us", "ns")),
        columns=tuple((pick("columns", ours, COLUMNS), theirs) for ours, theirs in columns.items()),
    )


def is_file(preset: object) -> TypeGuard[str]:
    """Whether a workload's name is that of a file."""
    return isinstance(preset, str) and Path(preset).suffix in (".yaml", ".yml")


def workload_fields(written: str | Mapping[str, Any], folder: Path) -> tuple[str | Mapping[str, Any], str | None]:
    """The workload's fields over those of the file it names (`x.yaml`, or `preset: x.yaml`); that file's name."""
    own = {"preset": written} if isinstance(written, str) else dict(written)
    preset = own.get("preset")
    if not is_file(preset):
        return written, None
    base = read_yaml(folder / preset)
    del own["preset"]
    return {**base, **own}, Path(preset).stem
