"""Compilation that never stands in the way: kept where a folder can be written, else in memory."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba


def source_digest() -> str:
    """A digest of this package's source, for `kept` functions to close over."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def compiled(function: Callable[..., Any]) -> Any:
    """`function` compiled into the functions that call it."""
    return numba.njit(error_model="numpy", nogil=True, forceinline=True)(function)


def seldom(function: Callable[..., Any]) -> Any:
    """`function` compiled once, apart from those that call it: for what happens so seldom that copies do not pay."""
    return numba.njit(error_model="numpy", nogil=True)(function)


def kept(function: Callable[..., Any]) -> Any:
    """`function` compiled, and its machine code kept for the next process where a cache folder can be written: beside
    the module, else the user's. On a read-only system each process compiles it anew.

    It must close over `source_digest()`: numba looks whether its file and what it closes over have changed, not
    whether the functions that it calls have.
    """
    try:
        return numba.njit(error_model="numpy", nogil=True, cache=True)(function)
    except RuntimeError:
        return numba.njit(error_model="numpy", nogil=True)(function)
