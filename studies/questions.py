"""The commands that ask what if: sweep, payoff, sensitivity."""

import os
from pathlib import Path
from typing import Annotated

import typer

from breakeven.models.inputs import InputError
from breakeven.studies.arguments import SetOption, StudyArgument, default_folder, study_path, writable

OutOption = Annotated[Path | None, typer.Option(help="Output folder (default: out/NAME).")]
VerifyOption = Annotated[bool, typer.Option("--verify/--no-verify", help="Simulate the optima that matter.")]

INTERRUPTED = 130


def _ended(name: str, folder: Path, interrupted: bool, answered: bool) -> int:
    """Say what was written and whether it is all; the exit status."""
    typer.echo(f"Written to {folder}{os.sep}: {name}.csv, {name}.json, {name}.png, {name}.svg")
    if interrupted:
        typer.echo("Interrupted: this is what was found until then.", err=True)
        return INTERRUPTED
    return 0 if answered else 1


def sweep(
    study: StudyArgument,
    over: Annotated[
        list[str], typer.Option(metavar="PATH=a:b:n|v1,v2,…", help="A field and its values; x2 is twice the study's.")
    ],
    out: OutOption = None,
    set_: SetOption = None,
    verify: VerifyOption = True,
) -> int:
    """Find the optimum again at each value of one or more fields: `--over load=x1,x2` says what doubling it costs."""
    from breakeven.studies.axes import read_axis
    from breakeven.studies.console import progress_bar, screen
    from breakeven.studies.run import remember_compiled
    from breakeven.studies.show_questions import show_sweep
    from breakeven.studies.study import Study
    from breakeven.studies.sweep import sweep as sweep_study
    from breakeven.studies.sweep_plot import draw_sweep

    loaded = Study.load(study_path(study), set_ or [])
    axes = [read_axis(text, loaded, "--over") for text in over]
    folder = writable(out or default_folder(study))
    remember_compiled()
    with progress_bar("points") as progress, progress_bar("simulating") as verifying:
        found = sweep_study(
            loaded, axes, progress=progress, verifying=verifying, **({} if verify else {"verify_seconds": 0.0})
        )
    found.save(folder)
    draw_sweep(found.table, found.record(), folder / "sweep.png")
    show_sweep(found, screen())
    return _ended("sweep", folder, found.interrupted, bool(any(found.table["topology"])))


def payoff(
    study: StudyArgument,
    x: Annotated[
        str | None, typer.Option("--x", metavar="PATH=a:b:n", help="Across; default: the link's bandwidth.")
    ] = None,
    y: Annotated[str | None, typer.Option("--y", metavar="PATH=a:b:n", help="Up; default: the load.")] = None,
    solve: Annotated[
        str | None, typer.Option(metavar="PATH[=a:b]", help="The break-even value of one field instead of a map.")
    ] = None,
    baseline: Annotated[str, typer.Option(help="What the split is set against: shared, or a topology.")] = "shared",
    out: OutOption = None,
    set_: SetOption = None,
    verify: VerifyOption = True,
) -> int:
    """Where a split pays: a map over two fields, or the break-even value of one."""
    from breakeven.studies.study import Study

    loaded = Study.load(study_path(study), set_ or [])
    if solve is not None and (x or y):
        raise InputError("--solve", solve, "either --solve, or --x and --y")
    folder = writable(out or default_folder(study))
    return _solve(loaded, solve, baseline, folder) if solve else _map(loaded, x, y, baseline, folder, verify)


def _map(loaded: "object", x: str | None, y: str | None, baseline: str, folder: Path, verify: bool) -> int:
    from breakeven.studies.axes import read_axis
    from breakeven.studies.console import progress_bar, screen
    from breakeven.studies.optima import Optima
    from breakeven.studies.payoff import VERIFY_SECONDS, default_axes
    from breakeven.studies.payoff import payoff as payoff_map
    from breakeven.studies.payoff_plot import draw_payoff
    from breakeven.studies.run import remember_compiled
    from breakeven.studies.show_questions import show_payoff
    from breakeven.studies.study import Study

    assert isinstance(loaded, Study)
    across, up = default_axes(loaded)
    first, second = read_axis(x or across, loaded, "--x"), read_axis(y or up, loaded, "--y")
    remember_compiled()
    with (
        progress_bar("preparing") as preparing,
        progress_bar("cells") as cells,
        progress_bar("simulating") as verifying,
    ):
        optima = Optima(loaded, (first, second), preparing)
        seconds = VERIFY_SECONDS if verify else 0.0
        found = payoff_map(loaded, first, second, baseline, seconds, optima, cells, verifying)
    found.save(folder)
    draw_payoff(found.table, found.record(), folder / "payoff.png")
    show_payoff(found, screen())
    return _ended("payoff", folder, found.interrupted, bool(found.signs.any()))


def _solve(loaded: "object", text: str, baseline: str, folder: Path) -> int:
    from breakeven.studies.console import progress_bar, screen
    from breakeven.studies.optima import Optima
    from breakeven.studies.run import remember_compiled
    from breakeven.studies.show_questions import show_solved
    from breakeven.studies.solve import solve, solve_axis
    from breakeven.studies.study import Study

    assert isinstance(loaded, Study)
    axis = solve_axis(text, loaded)
    remember_compiled()
    with progress_bar("preparing") as preparing, progress_bar("values") as progress, progress_bar("inputs") as inputs:
        found = solve(loaded, axis, baseline, Optima(loaded, (axis,), preparing), progress, inputs)
    found.save(folder)
    show_solved(found, loaded, screen())
    typer.echo(f"Written to {folder}{os.sep}: solve.csv")
    return 0 if found.crossings else 1


def sensitivity(
    target: Annotated[str, typer.Argument(metavar="STUDY.yaml|DIR", help="A study, or the output folder of a run.")],
    range_: Annotated[
        list[str] | None,
        typer.Option("--range", metavar="PATH=low:high", help="Factors an input lies between (default 0.8:1.25)."),
    ] = None,
    samples: Annotated[int, typer.Option(min=16, max=65536, help="Base samples of the Sobol indices.")] = 128,
    out: OutOption = None,
    set_: SetOption = None,
) -> int:
    """What the answer depends on: elasticities, Sobol indices, what flips the winner, and the fit's own error."""
    from breakeven.studies.console import progress_bar, screen
    from breakeven.studies.run import remember_compiled
    from breakeven.studies.sensitivity import chosen
    from breakeven.studies.sensitivity import sensitivity as analyse
    from breakeven.studies.sensitivity_plot import draw_sensitivity
    from breakeven.studies.show_questions import show_sensitivity
    from breakeven.studies.study import Study

    is_run = Path(target).is_dir()
    if is_run and set_:
        raise InputError("--set", set_[0], "with a study; an output folder keeps what it was made from")
    loaded = None if is_run else Study.load(study_path(target), set_ or [])
    folder = writable(out or (Path(target) if is_run else default_folder(target)))
    remember_compiled()
    with progress_bar("analyses") as progress:
        found = analyse(chosen(target, loaded), samples, range_ or (), progress)
    found.save(folder)
    draw_sensitivity(found.table, found.draws, found.record(), folder / "sensitivity.png")
    show_sensitivity(found, screen())
    typer.echo(f"Written to {folder}{os.sep}: sensitivity.csv, sensitivity_draws.csv, sensitivity.json, .png, .svg")
    return 0


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    for command in (sweep, payoff, sensitivity):
        app.command()(command)
