"""Shipped studies, and every change that the gallery makes to them, are valid studies."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from breakeven.studies.study import Study

ROOT = Path(__file__).parents[1]
QUESTIONS = yaml.safe_load((ROOT / "benchmarks" / "gallery.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def gallery(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("gallery")


@pytest.mark.parametrize("path", sorted((ROOT / "studies").rglob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_study_is_one(path: Path) -> None:
    study = Study.load(path)
    assert study.written.name == path.stem and study.written.about and study.space.size > 3


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_gallery_asks_valid_questions(gallery: ModuleType, name: str) -> None:
    asked = list(gallery.variants(QUESTIONS[name]))
    assert name in gallery.SECTIONS and set(gallery.SECTIONS[name][1]) <= set(asked[0][0])
    for _, changes in asked:
        assert Study.load(ROOT / "studies" / f"{QUESTIONS[name]['study']}.yaml", changes).space.size
