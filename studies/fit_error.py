"""How sure the calibration is: draws of its coefficients, and of what it misses on hardware it has not seen."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from breakeven.models.catalog import table
from breakeven.models.kernel_curves import provenance
from breakeven.models.variation import Input
from breakeven.studies.calibrate import SETTINGS
from breakeven.studies.study import Study

Floats = NDArray[np.float64]
TO_SD = 0.6745  # the median of |error| over its standard deviation, of a normal one


def log_sd(study: Study, each: Input) -> float:
    """Standard deviation of the logarithm of a calibrated input; 0 where it is not calibrated.

    A kernel's is that of its fit (`errors` in kernels.toml); an engine term's the one calibration.toml allows it, which
    the fit can only narrow.
    """
    if each.part == "kernels" and each.row is not None:
        row = provenance(study.names.accelerators[each.row].generation, each.fields[0])[2]
        return float(row["errors"]["median"]) / TO_SD
    terms = {**SETTINGS["engine"], **SETTINGS.get("memory", {})} if each.part == "engine" else {}
    return float(terms.get(each.fields[0], {}).get("sd", 0.0)) if each.fields else 0.0


def coefficient_draws(study: Study, inputs: Sequence[Input], draws: int, seed: int) -> Floats:
    """Factors of the inputs under independent lognormal errors of every calibrated coefficient, (draws, inputs)."""
    rng = np.random.default_rng(seed)
    sd = np.array([log_sd(study, each) for each in inputs])
    return np.exp(rng.standard_normal((draws, len(inputs))) * sd)


def misses(inputs: Sequence[Input], draws: int, seed: int) -> Floats:
    """Factors as if what the model misses on unseen pairs were an unknown speed of each accelerator: of its arithmetic
    by the error of TTFT, of its memory by that of TPOT. (draws, inputs)"""
    rng = np.random.default_rng(seed + 1)
    error = table("model_error")
    sd = {"compute": error["ttft_log_sd"], "memory_bandwidth": error["tpot_log_sd"]}
    each = np.array([sd.get(i.path.rsplit(".", 1)[-1], 0.0) if i.part == "hardware" else 0.0 for i in inputs])
    return np.exp(rng.standard_normal((draws, len(inputs))) * each)
