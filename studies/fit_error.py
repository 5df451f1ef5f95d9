"""How sure the calibration is: draws of its coefficients, and of what it misses on hardware it has not seen."""

import csv
import functools
import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from breakeven.models.catalog import table, text
from breakeven.models.kernel_curves import provenance
from breakeven.models.variation import Input
from breakeven.studies.calibrate import SETTINGS
from breakeven.studies.study import Study

Floats = NDArray[np.float64]
UNTOLD = 1e-3  # of a logarithm: a term that resampling does not move stays at its prior, and is as unsure
TO_SD = 0.6745  # the median of |error| over its standard deviation, of a normal one


def log_sd(study: Study, each: Input) -> float:
    """Standard deviation of the logarithm of a calibrated input; 0 where it is not calibrated.

    A kernel's is that of its fit (`errors` in kernels.toml); an engine term's the one calibration.toml allows it, which
    the fit can only narrow (used where no bootstrap tells of it).
    """
    if each.part == "kernels" and each.row is not None:
        row = provenance(study.names.accelerators[each.row].generation, each.fields[0])[2]
        return float(row["errors"]["median"]) / TO_SD
    terms = {**SETTINGS["engine"], **SETTINGS.get("memory", {})} if each.part == "engine" else {}
    return float(terms.get(each.fields[0], {}).get("sd", 0.0)) if each.fields else 0.0


@functools.cache
def _resampled(engine: str) -> dict[str, Floats]:
    """Field of an engine -> its values over the fitted one in fits to resampled (model, accelerator) pairs, where
    these points tell of it."""
    rows = csv.reader(io.StringIO(text("calibration_draws.csv")))
    next(rows)
    of_engine = {field: np.array(values, float) for field, engines, *values in rows if engine in engines.split()}
    return {field: values for field, values in of_engine.items() if np.std(np.log(values)) > UNTOLD}


def coefficient_draws(study: Study, inputs: Sequence[Input], draws: int, seed: int) -> Floats:
    """Factors of the inputs under the error of every calibrated coefficient, (draws, inputs).

    What the engine adds comes from a bootstrap of its fit (`breakeven calibrate`, calibration_draws.csv): one resampled
    fit a draw, so that terms which stand in for one another move together. Kernel curves, the memory fields and terms
    that no measured point tells of have independent lognormal errors.
    """
    rng = np.random.default_rng(seed)
    sd = np.array([log_sd(study, each) for each in inputs])
    factors = np.exp(rng.standard_normal((draws, len(inputs))) * sd)
    known = _resampled(study.engine_name)
    fit = rng.integers(min(map(len, known.values())), size=draws) if known else None
    for i, each in enumerate(inputs):
        if each.part == "engine" and each.fields and each.fields[0] in known:
            factors[:, i] = known[each.fields[0]][fit]
    return factors


def misses(inputs: Sequence[Input], draws: int, seed: int) -> Floats:
    """Factors as if what the model misses on unseen pairs were an unknown speed of each accelerator: of its arithmetic
    by the error of TTFT, of its memory by that of TPOT. (draws, inputs)"""
    rng = np.random.default_rng(seed + 1)
    error = table("model_error")
    sd = {"compute": error["ttft_log_sd"], "memory_bandwidth": error["tpot_log_sd"]}
    each = np.array([sd.get(i.path.rsplit(".", 1)[-1], 0.0) if i.part == "hardware" else 0.0 for i in inputs])
    return np.exp(rng.standard_normal((draws, len(inputs))) * each)
