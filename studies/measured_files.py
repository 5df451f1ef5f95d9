"""Reads files of measured serving points and of labels for them; a bad file is one line that names what is wrong."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from breakeven.models.inputs import InputError
from breakeven.studies.measured import Point, clean, digits
from breakeven.studies.measured_limits import without_impossible

REQUIRED = (
    "id",
    "backend",
    "model_path",
    "system",
    "precision",
    "mode",
    "isl",
    "osl",
    "tp_size",
    "silicon_ttft_ms",
    "silicon_tpot_ms",
)
NUMBERS = ("isl", "osl", "silicon_ttft_ms", "silicon_tpot_ms")


def is_table_of_points(path: str | Path) -> bool:
    """Whether the file's first line names the columns of measured points."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            return {"model_path", "silicon_tpot_ms"} <= set(file.readline().strip().split(","))
    except (OSError, UnicodeDecodeError):
        return False


def read_table(path: str | Path) -> pd.DataFrame:
    """The rows of a CSV of measured points; InputError where it is none."""
    try:
        table = pd.read_csv(path, dtype={"id": str}, low_memory=False)
    except (OSError, ValueError, UnicodeDecodeError) as error:
        raise InputError("MEASURED.csv", str(path), f"a readable CSV file ({_first_line(error)})") from None
    for name in REQUIRED:
        if name not in table.columns:
            raise InputError(name, None, "is required: a column of the measured points", str(path))
    for name in NUMBERS:
        values = np.asarray(pd.to_numeric(table[name], errors="coerce"), float)
        bad = ~(values > 0.0) | np.isinf(values)
        if bad.any():
            row = int(bad.argmax())
            raise InputError(f"row {row + 2}.{name}", _plain(table[name].iloc[row]), "a positive number", str(path))
        table[name] = values
    return table


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def read_points(path: str | Path, labels: str | Path | None = None) -> list[Point]:
    """Every row of the file as a point, in its order; `labels` is an InferenceX export that names speculation."""
    known = read_labels(labels) if labels else {}
    return without_impossible(clean(read_table(path), known))


LABELS = ("ttft_ms", "tpot_ms", "spec_decode", "prefill_par", "decode_par")


def read_labels(path: str | Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Labels by (TTFT, TPOT) to four digits: `spec_decode`, and the layouts and workers of split deployments."""
    try:
        table = pd.read_csv(path, low_memory=False)
    except (OSError, ValueError, UnicodeDecodeError) as error:
        raise InputError("--labels", str(path), f"a readable CSV file ({_first_line(error)})") from None
    for name in LABELS:
        if name not in table.columns:
            raise InputError(name, None, "is required: a column of the labels", str(path))
    records: list[dict[str, Any]] = cast(Any, table[list(LABELS)]).to_dict("records")
    return {digits(row["ttft_ms"], row["tpot_ms"]): row for row in records}
