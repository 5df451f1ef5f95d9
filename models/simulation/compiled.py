"""Compilation that never stands in the way: cached where a folder can be written, else in memory."""

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Any:
    """`function` compiled by numba, its machine code kept for the next process where some cache folder can be written
    (beside the module, else the user's cache); on a read-only system it is compiled anew in each process."""
    try:
        return numba.njit(cache=True, error_model="numpy", nogil=True, forceinline=function.__name__ != "play")(
            function
        )
    except RuntimeError:
        return numba.njit(error_model="numpy", nogil=True)(function)
