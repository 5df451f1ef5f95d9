"""What several commands take: a study by path or name, a folder that can be written."""

from pathlib import Path
from typing import Annotated

import typer

from breakeven.models.inputs import InputError

StudyArgument = Annotated[str, typer.Argument(metavar="STUDY.yaml", help="A study file, or the name of a shipped one.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change a field of the study; repeatable.")
]


def study_path(name: str) -> Path:
    """The study file named: a path, or a shipped study's name with or without .yaml."""
    path = Path(name)
    if not path.exists() and path.name == name:
        file, here = f"{name.removesuffix('.yaml')}.yaml", Path(__file__).parent
        return next((shipped for shipped in (here / file, here / "published" / file) if shipped.exists()), path)
    return path


def default_folder(name: str) -> Path:
    """Where a study's output goes unless said otherwise."""
    return Path("out") / Path(name).name.removesuffix(".yaml")


def writable(folder: Path) -> Path:
    """The folder, made where it is missing; InputError where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".write"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError("--out", str(folder), f"cannot be written: {error.strerror}") from None
    return folder
