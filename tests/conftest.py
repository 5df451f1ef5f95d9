"""Shared fixtures: studies over real catalogue rows, and one batch of candidates that every law is tried on.

The model is compiled once per shape, so everything here has the same: five accelerators, two links, weight schemes
and KV precisions, batches of `SMALL` candidates, and an SLO with every bound.
"""

import copy
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import settings

from breakeven.models.deployment import Deployment
from breakeven.models.serving import Outcome, evaluate
from breakeven.models.tables import Resolved, resolve
from breakeven.optimizer import evaluator
from breakeven.optimizer.evaluator import SMALL
from breakeven.studies.run import remember_compiled
from breakeven.studies.schema import set_path
from breakeven.studies.study import Study

# Tests compile far more than they compute: a third of the time to compile, four times that to run.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")
settings.register_profile("laws", deadline=None)  # the first example compiles
settings.load_profile("laws")

BASE: dict[str, Any] = {
    "name": "test",
    "llm": "llama-3.1-70b",
    "workload": "coding-agent",
    "load": {"sessions_per_second": 0.01},
    "slo": {"ttft_s": 5.0, "tpot_s": 0.04, "call_s": 60.0, "session_s": 2e4, "target": 0.9},
    "space": {
        "topologies": ["colocated", "chunked", "pd"],
        "accelerators": ["h100-sxm", "h200-sxm", "b200-sxm", "l40s", "mi300x"],
        "tensor_parallel": [1, 2, 4, 8],
        "pipeline_parallel": [1, 2],
        "replicas": [1, 2, 3, 4, 8, 16],
        "max_batch": [16, 64, 256],
        "token_budget": [2048, 8192],
        "weights": ["bf16", "fp8"],
        "kv": ["bf16", "fp8"],
        "links": ["ib-ndr-400", "nvlink4"],
        "routing": ["affinity", "balanced"],
    },
}

MakeStudy = Callable[..., Study]
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MAPS = Path("/proc/self/maps")
MOST_MAPS = 8_000  # of the 65,530 that Linux lets a process have; compiled code takes them until XLA crashes


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All test processes, and what they start, share compiled functions in a folder of this run."""
    folder = tmp_path_factory.getbasetemp()
    os.environ["XDG_CACHE_HOME"] = str((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cache")
    remember_compiled()


@pytest.fixture(scope="module", autouse=True)
def _room_for_compiled_code() -> Iterator[None]:
    """Forgets compiled functions between modules when they hold too many memory mappings; the folder has them."""
    yield
    if MAPS.exists() and MAPS.read_text().count("\n") > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture(scope="session")
def make_study() -> MakeStudy:
    """Builds a study from `BASE`: keywords replace choices of its space, `changes` are `PATH=VALUE`."""

    def make(*changes: str, **choices: Any) -> Study:
        data = copy.deepcopy(BASE)
        data["space"] |= choices
        for change in changes:
            set_path(data, change)
        return Study.parse(data, "test")

    return make


@pytest.fixture(scope="session")
def study(make_study: MakeStudy) -> Study:
    return make_study()


@pytest.fixture(scope="session")
def one(make_study: MakeStudy) -> Callable[..., tuple[Resolved, Study]]:
    """Resolves the first candidate of a colocated space with the given choices, beside its study."""

    def build(*changes: str, **choices: Any) -> tuple[Resolved, Study]:
        made = make_study(*changes, **{"topologies": "colocated", "weights": "bf16", "kv": "bf16"} | choices)
        return resolve(made.space.deployment(np.array([0])), made.catalog), made

    return build


@pytest.fixture(scope="session", autouse=True)
def _small_blocks() -> Iterator[None]:
    """Evaluators of large spaces use the batch that is compiled already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluator, "BLOCK", evaluator.SMALL)
        yield


@pytest.fixture(scope="session")
def outcome_of() -> Callable[..., Outcome]:
    """The outcome of all candidates of a study, of which there are at most `SMALL`; under its workload or another."""

    def find(study: Study, workload: Any = None) -> Outcome:
        size = study.space.size
        assert size <= SMALL
        deployment = study.evaluator().deployment(np.arange(size), SMALL)
        found = evaluate(deployment, workload or study.workload, study.slo, study.catalog)
        return jax.tree.map(lambda leaf: leaf[:size], found)

    return find


def draw(study: Study, n: int, seed: int) -> np.ndarray:
    """`n` candidates, as many of each topology."""
    rng = np.random.default_rng(seed)
    sizes, offsets = [family.size for family in study.space.families], study.space.offsets
    family = np.arange(n) % len(sizes)
    return offsets[family] + (rng.random(n) * np.array(sizes)[family]).astype(np.int64)


@pytest.fixture(scope="session")
def random_ids() -> Callable[[Study, int, int], np.ndarray]:
    return draw


@pytest.fixture(scope="session")
def candidates(study: Study) -> np.ndarray:
    """Half of them feasible at the study's load, half anything."""
    feasible: list[int] = []
    for seed in range(20):
        ids = draw(study, SMALL, seed)
        found = evaluate(study.space.deployment(ids), study.workload, study.slo, study.catalog)
        feasible += ids[np.asarray(found.feasible)].tolist()
        if len(feasible) >= SMALL // 2:
            break
    assert len(feasible) >= SMALL // 2
    return np.concatenate([np.array(feasible[: SMALL // 2]), draw(study, SMALL // 2, 99)])


@pytest.fixture(scope="session")
def deployment(study: Study, candidates: np.ndarray) -> Deployment:
    return study.space.deployment(candidates)


@pytest.fixture(scope="session")
def load_benchmark() -> Callable[[str], ModuleType]:
    """A script of benchmarks/ as a module."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
