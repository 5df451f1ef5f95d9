"""Typed look-ups in a configuration mapping: each gives a checked value or an error that names the field."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from breakeven.models.inputs import InputError, number

WIDEST = 10_000_000


class Fields:
    """A mapping whose fields are read by one or several names; it remembers which names were asked for."""

    def __init__(self, mapping: Mapping[str, Any]):
        self.mapping = mapping
        self.asked: set[str] = set()

    def first(self, *names: str) -> tuple[str, Any]:
        """The first of these names that has a value, and the value; else the last name and None."""
        self.asked.update(names)
        for name in names:
            if self.mapping.get(name) is not None:
                return name, self.mapping[name]
        return names[-1], None

    def get(self, *names: str) -> Any:
        """The value of the first of these names that has one, else None."""
        return self.first(*names)[1]

    def whole(self, *names: str, low: int = 1, high: int = WIDEST, default: int | None = None) -> int:
        """A whole number in [low, high]; `default` where the field is absent or null."""
        name, value = self.first(*names)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and not low <= value <= high:
            raise InputError(name, value, f"a whole number from {low} to {high}")
        if value is None:
            raise InputError(name, None, f"missing; a whole number from {low} to {high}")
        return int(number(name, value, low, high, whole=True))

    def divisor(self, of: int, *names: str) -> int:
        """A whole number that divides `of`; `of` itself where the field is absent."""
        name, _ = self.first(*names)
        value = self.whole(*names, high=of, default=of)
        if of % value:
            raise InputError(name, value, f"a divisor of the {of} attention heads")
        return value

    def head_dim(self, hidden: int, heads: int, *names: str) -> int:
        """The width of a head: as stated, else the hidden size over the heads."""
        if self.get(*names) is None and hidden % heads:
            raise InputError("hidden_size", hidden, f"a multiple of the {heads} attention heads, or state head_dim")
        return self.whole(*names, default=hidden // heads)

    def flag(self, name: str, default: bool) -> bool:
        """True or false; `default` where the field is absent or null."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise InputError(name, value, "true or false")
        return default if value is None else value

    def text(self, name: str) -> str:
        """A text, empty where the field is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise InputError(name, value, "a text")
        return value or ""

    def labels(self, name: str, allowed: Collection[Any], count: int | None = None) -> list[Any] | None:
        """A list (or string) of labels out of `allowed`, `count` of them; None where the field is absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | str):
            raise InputError(name, value, "a list, one entry per layer")
        for label in value:
            if not isinstance(label, str | int) or label not in allowed:
                raise InputError(name, label, "one of " + ", ".join(map(str, allowed)))
        if count is not None and len(value) != count:
            raise InputError(name, value, f"{count} entries, one per layer; it has {len(value)}")
        return list(value)

    def indices(self, name: str, count: int) -> list[int] | None:
        """Distinct layer numbers below `count`, listed or comma-separated; None where the field is absent."""
        value = self.get(name)
        if value is None:
            return None
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list):
            raise InputError(name, value, "a list of layer numbers")
        numbers = [_index(name, item, count) for item in items]
        if len(set(numbers)) != len(numbers):
            raise InputError(name, value, "each layer at most once")
        return numbers

    def inner(self, name: str) -> "Fields | None":
        """The mapping under this name; None where the field is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise InputError(name, value, "a mapping of fields")
        return None if value is None else Fields(value)

    def unread(self, names: Iterable[str]) -> None:
        """InputError for the first of these names that nothing has asked for."""
        for name in names:
            if name not in self.asked:
                close = difflib.get_close_matches(str(name), sorted(self.asked), n=2, cutoff=0.6)
                hint = f"did you mean {' or '.join(close)}?" if close else "not one that this architecture reads"
                raise InputError(str(name), self.mapping.get(name), f"unknown field; {hint}")


def _index(name: str, item: Any, count: int) -> int:
    try:
        value = int(item) if isinstance(item, str) else item
    except ValueError:
        raise InputError(name, item, f"layer numbers from 0 to {count - 1}") from None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise InputError(name, item, f"layer numbers from 0 to {count - 1}")
    return value
