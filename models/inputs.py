"""One-line errors for bad input: file, field, value, what is allowed."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class InputError(ValueError):
    """A bad input that a user can mend: says which file and field, the value, and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str, file: str | None = None):
        self.field, self.value, self.allowed, self.file = field, value, allowed, file
        super().__init__(field, value, allowed, file)

    def __str__(self) -> str:
        where = f"{self.file}: " if self.file else ""
        return f"{where}{self.field} = {_short(self.value)}: {self.allowed}"

    def inside(self, prefix: str = "", file: str | None = None) -> "InputError":
        """The same error seen from outside: `prefix` before its field, and the file it stands in."""
        field = f"{prefix}.{self.field}" if prefix and self.field else prefix or self.field
        return InputError(field, self.value, self.allowed, self.file or file)


def _short(value: object, length: int = 80) -> str:
    """The value in at most `length` characters: its middle is left out, for a path is known by its end."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= length else f"{text[: length // 3]}…{text[-(length - length // 3 - 1) :]}"


def pick(field: str, value: object, choices: Iterable[str], shown: int = 12) -> str:
    """`value` if it is one of `choices`; else an InputError that suggests close names."""
    names = list(choices)
    if isinstance(value, str) and value in names:
        return value
    close = difflib.get_close_matches(str(value).lower(), names, n=3, cutoff=0.5)
    listed = ", ".join(names[:shown]) + (f", … ({len(names)} in all)" if len(names) > shown else "")
    hint = f"unknown; did you mean {' or '.join(close)}?" if close else f"unknown; one of {listed}"
    raise InputError(field, value, hint)


def number(field: str, value: object, low: float, high: float, *, whole: bool = False) -> float:
    """`value` as a float when it is a number in [low, high] (a whole one if asked); else InputError."""
    kind = "a whole number" if whole else "a number"
    allowed = f"{kind} from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(field, value, allowed)
    if not low <= value <= high or (whole and value != int(value)):
        raise InputError(field, value, allowed)
    return float(value)


def known_fields(given: Mapping[str, Any], allowed: Iterable[str], field: str = "") -> None:
    """InputError for the first key of `given` that is not allowed."""
    names = list(allowed)
    for key in given:
        if key not in names:
            close = difflib.get_close_matches(str(key), names, n=2, cutoff=0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else "allowed: " + ", ".join(names)
            raise InputError(f"{field}.{key}" if field else str(key), given[key], f"unknown field; {hint}")
