"""What is shipped: every folder with code is in the wheel's list, every import goes down only."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("models", "spaces", "optimizer", "studies")


def test_every_package_is_listed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {
        f"breakeven.{'.'.join(p.parent.relative_to(ROOT).parts)}"
        for r in ROOMS
        for p in (ROOT / r).rglob("__init__.py")
    }
    assert listed == found | {"breakeven"}


def test_imports_go_down_only() -> None:
    """studies -> optimizer -> spaces -> models."""
    for depth, room in enumerate(ROOMS):
        above = "|".join(ROOMS[depth + 1 :])
        for path in (ROOT / room).rglob("*.py"):
            text = path.read_text()
            assert not (above and re.search(rf"breakeven\.({above})\b", text)), f"{path} imports from above"


def test_the_readme_shows_one_test_command() -> None:
    """`.ci/run` runs the command that the README shows."""
    shown = [
        line
        for line in (ROOT / "README.md").read_text().splitlines()
        if re.match(r"    python3 -m venv .*pytest", line)
    ]
    assert len(shown) == 1
