"""The commands that hand an answer on: report, deploy."""

import os
from pathlib import Path
from typing import Annotated

import typer

from breakeven.models.inputs import pick
from breakeven.studies.arguments import writable


def report(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Output folder of a run.")]) -> int:
    """Write report.html and report.md again, with what other commands have added to the folder since."""
    from breakeven.studies.report import write_report

    write_report(folder)
    typer.echo(f"Written: {folder / 'report.html'}, {folder / 'report.md'}")
    return 0


def deploy(
    deployment: Annotated[str, typer.Argument(metavar="DEPLOYMENT.yaml|DIR[:row]", help="What to launch.")],
    engine: Annotated[str, typer.Option(help="vllm, sglang, dynamo or llm-d.")] = "vllm",
    out: Annotated[Path | None, typer.Option(help="Folder to write into (default: deploy/ENGINE).")] = None,
) -> int:
    """Write a deployment as launch commands or manifests, and say what the engine cannot do of it."""
    from breakeven.studies.deploy import TARGETS, missing, write_deployment
    from breakeven.studies.deployment_file import read_deployment
    from breakeven.studies.plan import plan

    pick("--engine", engine, TARGETS)
    found = plan(read_deployment(deployment))
    folder = writable(out or Path("deploy") / engine)
    names = write_deployment(found, engine, folder)
    typer.echo(f"{found.title} ({found.topology}) on {engine}.")
    for line in missing(found, engine):
        typer.echo(f"Not today: {line}.")
    typer.echo(f"Written to {folder}{os.sep}: {', '.join(names)}")
    return 0


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    for command in (report, deploy):
        app.command()(command)
