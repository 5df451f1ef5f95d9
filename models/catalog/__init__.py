"""The catalogue: data files, each row with its source, and one reader for them."""

import functools
import tomllib
from importlib import resources
from typing import Any


@functools.cache
def table(name: str) -> dict[str, Any]:
    """The TOML data file `name` of this package, as a dict (shared: do not change it)."""
    return tomllib.loads(text(f"{name}.toml"))


def text(file_name: str) -> str:
    """The text of a data file of this package."""
    return resources.files("breakeven.models.catalog").joinpath(file_name).read_text(encoding="utf-8")
