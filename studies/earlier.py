"""What an earlier run found, as structures of another study: where its search may start."""

from pathlib import Path

import numpy as np
import pandas as pd

from breakeven.models.inputs import InputError
from breakeven.optimizer.encoding import Encoding
from breakeven.spaces.structures import Structures
from breakeven.studies.deployment_file import FRONT, read_record
from breakeven.studies.study import Study


def earlier_structures(study: Study) -> tuple[int, ...]:
    """Structures of `study` nearest to the front in its `search.warm_start` folder."""
    folder = Path(study.file).parent / str(study.written.search.warm_start)
    record = read_record(folder)
    earlier = Study.parse(record["study"], record["file"])
    if earlier.space.size != record["candidates_in_space"]:
        raise InputError("search.warm_start", str(folder), "a folder of this version: its candidates are numbered anew")
    try:
        ids = pd.read_csv(folder / FRONT)["candidate"].to_numpy(np.int64)
    except (OSError, ValueError, KeyError):
        raise InputError("search.warm_start", str(folder), f"{FRONT} cannot be read") from None
    theirs, ours = Structures(earlier.space), Structures(study.space)
    old, new = Encoding(theirs), Encoding(ours)
    structures = dict.fromkeys(int(s) for s in theirs.of(ids))
    return tuple(dict.fromkeys(new.named(old.described(s)) for s in structures))
