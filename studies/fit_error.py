"""How sure the calibration is: bootstrap draws of its coefficients, and what it misses on hardware it has not seen."""

import csv
import functools
import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from breakeven.models.catalog import table, text
from breakeven.models.variation import Input
from breakeven.studies.calibrate import generation_owner
from breakeven.studies.study import Study

Floats = NDArray[np.float64]
FILE = "calibration_influence.csv"


@functools.cache
def influence() -> tuple[tuple[str, ...], Floats]:
    """(coefficients, how far each combination of measured points moves their logarithms, one row each)."""
    header, *rows = csv.reader(io.StringIO(text(FILE)))
    return tuple(header[1:]), np.array([row[1:] for row in rows], float)


def coefficient(study: Study, each: Input) -> str | None:
    """The calibrated coefficient that an input is, as calibration_influence.csv names it; None where it is none."""
    known = influence()[0]
    if each.part == "hardware" and each.row is not None and len(each.fields) == 1:
        owner = generation_owner(study.names.accelerators[each.row].generation)
        kind = "efficiency"
    elif each.part == "engine":
        spec = study.written.engine
        owner, kind = (spec if isinstance(spec, str) else spec.get("like", "vllm")), "engine"
    else:
        return None
    return next((n for n in known if _names(n) == (kind, each.fields[0]) and owner in _owners(n)), None)


def _names(column: str) -> tuple[str, str]:
    kind, _, field = column.split(".")
    return kind, field


def _owners(column: str) -> list[str]:
    return column.split(".")[1].split("+")


def coefficient_sd(study: Study, each: Input) -> float:
    """Standard error of an input's logarithm by its fit; 0 where it is not fitted."""
    name = coefficient(study, each)
    names, moves = influence()
    return 0.0 if name is None else float(np.sqrt(np.square(moves[:, names.index(name)]).sum()))


def bootstrap(study: Study, inputs: Sequence[Input], draws: int, seed: int) -> Floats:
    """Factors of the inputs under `draws` resamplings of the calibration's combinations, (draws, inputs).

    Each draw takes as many combinations as there are, with replacement, and moves every coefficient by the sum of their
    influences: the fit's own change to first order. Inputs that are not fitted keep a factor of one.
    """
    names, moves = influence()
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(len(moves), np.full(len(moves), 1.0 / len(moves)), size=draws)
    shifts = (counts - 1.0) @ moves
    columns = [coefficient(study, each) for each in inputs]
    return np.stack([np.ones(draws) if c is None else np.exp(shifts[:, names.index(c)]) for c in columns], 1)


def misses(inputs: Sequence[Input], draws: int, seed: int) -> Floats:
    """Factors as if what the model misses on unseen pairs were an unknown speed of each accelerator: of its arithmetic
    by the error of TTFT, of its memory by that of TPOT. (draws, inputs)"""
    rng = np.random.default_rng(seed)
    sd = {"compute": table("model_error")["ttft_log_sd"], "memory_bandwidth": table("model_error")["tpot_log_sd"]}
    noise = rng.standard_normal((draws, len(inputs)))
    each = np.array([sd.get(i.path.rsplit(".", 1)[-1], 0.0) if i.part == "hardware" else 0.0 for i in inputs])
    return np.exp(noise * each)
