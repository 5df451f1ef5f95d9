"""What a study's limits leave of its space before anything is evaluated: good enough formats, what runs today."""

from pathlib import Path

import numpy as np
import pandas as pd

from breakeven.models.inputs import InputError
from breakeven.spaces.deployable import deployable, what_is_missing
from breakeven.spaces.formats import good_enough
from breakeven.spaces.space import Space
from breakeven.studies.schema import Limits, QualityFields

COLUMNS = ("weights", "kv", "score")


def narrowed(space: Space, limits: Limits, llm: str, engine: str, folder: Path) -> Space:
    """The candidates that the limits allow; files they name are relative to `folder`. InputError if none is left."""
    if limits.quality is not None:
        space = _good_enough(space, limits.quality, llm, folder)
    return _deployable(space, engine) if limits.deployable == "today" else space


def _deployable(space: Space, engine: str) -> Space:
    kept = deployable(space, engine)
    if kept.size == 0:
        words = f"{engine} runs none of this space, not: {what_is_missing(space, engine)}"
        raise InputError("limits.deployable", "today", words)
    return kept


def _good_enough(space: Space, asked: QualityFields, llm: str, folder: Path) -> Space:
    scores = read_scores(folder / asked.table, llm)
    kept = good_enough(space, scores, asked.at_least)
    if kept.size == 0:
        known = [scores.get((weights, kv), -np.inf) for weights in space.names.weights for kv in space.names.kv]
        words = f"no formats of this space score as much; the best have {max(known):g}"
        raise InputError("limits.quality.at_least", asked.at_least, words)
    return kept


def read_scores(path: Path, llm: str) -> dict[tuple[str, str], float]:
    """Scores by (weights, kv) in a CSV file with columns `weights`, `kv`, `score`; of several models `llm`, too.

    Raises InputError on a file that cannot be read, without these columns, with a score that is no number or a
    combination twice, or without a row of the model.
    """
    file = str(path)
    try:
        rows = pd.read_csv(path, comment="#")
    except (OSError, ValueError) as error:
        raise InputError("limits.quality.table", file, f"a CSV file that can be read: {error}") from None
    for name in (name for name in COLUMNS if name not in rows):
        raise InputError(name, None, "a column of the table of scores", file)
    if "llm" in rows:
        rows = rows.loc[rows["llm"] == llm]
    if rows.empty:
        raise InputError("llm", llm, "a model that the table of scores has", file)
    score = pd.Series(pd.to_numeric(rows["score"], errors="coerce"))
    for line in rows.index[score.isna()][:1]:
        raise InputError(f"score, row {line + 1}", rows["score"][line], "a number", file)
    keys = list(zip(rows["weights"].astype(str), rows["kv"].astype(str), strict=True))
    for line, key in enumerate(keys):
        if key in keys[:line]:
            raise InputError(f"weights, kv, row {rows.index[line] + 1}", ", ".join(key), "each combination once", file)
    return dict(zip(keys, score.tolist(), strict=True))
