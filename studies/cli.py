"""The command line. Exit status: 0 an answer, 1 nothing feasible, 2 bad input (one line), 3 a fault of ours."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from breakeven.models.inputs import InputError
from breakeven.studies import handover, questions
from breakeven.studies.arguments import SetOption, StudyArgument, default_folder, study_path, writable

app = typer.Typer(
    name="breakeven",
    help="When does disaggregation pay? Cost versus SLO attainment of every way to serve an LLM to agents.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

NOTHING, BAD_INPUT, OUR_FAULT, INTERRUPTED = 1, 2, 3, 130

LocalOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Corrections that `calibrate --local` measured on your system.")
]


@app.command()
def run(
    study: StudyArgument,
    out: Annotated[Path | None, typer.Option(help="Output folder (default: out/NAME).")] = None,
    set_: SetOption = None,
    search: Annotated[str | None, typer.Option(help="auto, exhaustive or optuna.")] = None,
    trials: Annotated[int | None, typer.Option(help="Trials of an Optuna search.")] = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Database that workers share (default: a file in --out)."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Dask scheduler whose workers share an exhaustive search.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of an Optuna search and of the simulations.")] = None,
    verify: Annotated[bool | None, typer.Option(help="Simulate the candidates that matter (default: yes).")] = None,
    local: LocalOption = None,
) -> int:
    """Search a study's space: the front, and the cheapest deployment that meets the SLO."""
    from breakeven.optimizer.checkpoint import locked
    from breakeven.studies.console import progress_bar, screen, show_result
    from breakeven.studies.redraw import draw
    from breakeven.studies.report import write_explanation, write_report
    from breakeven.studies.run import finish, remember_compiled
    from breakeven.studies.run import run as run_study
    from breakeven.studies.study import Study

    options = {"method": search, "trials": trials, "seed": seed, "verify": verify}
    changes = [*(set_ or []), *[f"search.{k}={v}" for k, v in options.items() if v is not None]]
    if local is not None:
        changes.append(f"local={local.resolve()}")
    loaded = Study.load(study_path(study), changes)
    folder = writable(out or default_folder(study))
    remember_compiled()
    with locked(folder):
        with (
            progress_bar("evaluating") as progress,
            progress_bar("verifying") as verifying,
            progress_bar("evaluating cells") as mixing,
        ):
            result = run_study(loaded, progress, storage, verifying, folder, cluster, mixing)
        result.save(folder)
        draw(folder, "pareto")
        write_explanation(result, folder)
        write_report(folder)
        if not result.interrupted:
            finish(folder)
    show_result(result, screen())
    also = "" if result.mixed is None else ", mixed.csv"
    typer.echo(
        f"Written to {folder}{os.sep}: front.csv, evaluations.parquet, study.json, pareto.png, .svg, report.html, .md"
        + also
    )
    if result.interrupted:
        typer.echo("Interrupted: this is what was found until then.", err=True)
        return INTERRUPTED
    mix = None if result.mixed is None else result.mixed.best
    return 0 if result.best is not None or mix is not None else NOTHING


@app.command()
def worker(
    storage: Annotated[str, typer.Option(metavar="URL", help="The database of the study.")],
    study: Annotated[str, typer.Option(metavar="NAME", help="The name of a study that `run --storage` began.")],
    threads: Annotated[int, typer.Option(min=1, help="Threads of the model; better one worker for each core.")] = 1,
) -> int:
    """Join a distributed study: do its trials, with any number of other workers, until all are complete."""
    os.environ["NPROC"] = str(threads)  # XLA sizes its pool of threads by it, when it starts
    from breakeven.studies.console import progress_bar
    from breakeven.studies.run import remember_compiled
    from breakeven.studies.worker import help_out

    remember_compiled()
    with progress_bar("trials") as progress:
        done = help_out(storage, study, progress)
    typer.echo(f"{done:,} trials of {study} done here; all are complete.")
    return 0


@app.command()
def explain(
    deployment: Annotated[str, typer.Argument(metavar="DEPLOYMENT.yaml|DIR[:row|:topology]", help="What to explain.")],
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    against: Annotated[
        str | None, typer.Option(metavar="BASELINE", help="Beside another deployment, or the best of a topology.")
    ] = None,
    local: LocalOption = None,
) -> int:
    """Show one deployment term by term: time, memory, utilization, money, and where the numbers come from."""
    import json

    from breakeven.models.topology import TOPOLOGIES
    from breakeven.studies.attribution import bill_of, gain
    from breakeven.studies.console import screen, show_explanation
    from breakeven.studies.deployment_file import read_deployment
    from breakeven.studies.explain import explain as explain_deployment
    from breakeven.studies.run import remember_compiled
    from breakeven.studies.show_questions import show_gain

    deployed = read_deployment(deployment, local)
    if against in TOPOLOGIES and Path(deployment.split(":")[0]).is_dir():
        against = f"{deployment.split(':')[0]}:{against}"
    baseline = read_deployment(against) if against else None
    remember_compiled()
    found = explain_deployment(deployed)
    other = explain_deployment(baseline) if baseline else None
    gained = gain(bill_of(deployed), bill_of(baseline)) if baseline else None
    if json_:
        shown: dict[str, Any] = {"title": found.title, **found.sections}
        if other is not None:
            shown["against"] = {"title": other.title, **other.sections}
            shown["gain"] = gained.record() if gained else None
        typer.echo(json.dumps(shown, indent=2, ensure_ascii=False, default=float))
    else:
        show_explanation(found, screen(), other)
        if gained is not None:
            show_gain(gained, screen())
    return 0


@app.command()
def simulate(
    deployment: Annotated[str, typer.Argument(metavar="DEPLOYMENT.yaml|DIR[:row]", help="What to simulate.")],
    calls: Annotated[int, typer.Option(min=100, max=100_000_000, help="Calls to measure.")] = 200_000,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the random numbers.")] = 0,
    warmup: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of the time that is not measured.")] = 0.3,
    out: Annotated[Path | None, typer.Option(help="Write calls.parquet and latency.png into this folder.")] = None,
    perfetto: Annotated[Path | None, typer.Option(metavar="OUT.json", help="Write a Chrome trace.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Replay every session of a recorded workload, once.")
    ] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="The trace's format (default: told from the file).")
    ] = None,
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help="Leave malformed rows out.")] = False,
    column_map: Annotated[
        str | None, typer.Option("--column-map", metavar="OURS=THEIRS,…", help="Where our fields stand in a table.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME=VALUE", help="As in a study's workload: time_unit=s; repeatable."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=1e-9, help="Sessions per second of a replay (default: as recorded, else the load)."),
    ] = None,
    local: LocalOption = None,
) -> int:
    """Play one deployment forward, call by call, and show what it does beside what the model predicts."""
    from breakeven.studies.console import screen, show_simulation
    from breakeven.studies.deployment_file import read_deployment
    from breakeven.studies.replay import replay_trace, trace_fields
    from breakeven.studies.run import remember_compiled
    from breakeven.studies.simulate import calls_frame, simulate_deployment
    from breakeven.studies.trace import write_trace

    given = trace_fields(trace, format_, skip_bad_rows, column_map, option or (), rate)

    deployed = read_deployment(deployment, local)
    folder = writable(out) if out else None
    if perfetto:
        writable(perfetto.parent)
    remember_compiled()
    if given is None:
        found = simulate_deployment(deployed, calls, seed, warmup, trace=perfetto is not None)
    else:
        found, notes = replay_trace(deployed, given, rate, seed, log=perfetto is not None)
        for line in notes:
            screen().print(line, highlight=False, markup=False, soft_wrap=True)
    show_simulation(found, screen())
    if folder:
        import json

        from breakeven.studies.latency_plot import latency
        from breakeven.studies.redraw import LATENCY

        frame = calls_frame(found.replications)
        frame.to_parquet(folder / "calls.parquet", index=False)
        made = {"bounds_s": found.seconds, "title": found.title, "study": deployed.study.written.name, "seed": seed}
        (folder / LATENCY).write_text(json.dumps(made, default=float), encoding="utf-8")
        latency(frame, found.seconds, found.title, folder / "latency.png", made)
        typer.echo(f"Written to {folder}{os.sep}: calls.parquet, {LATENCY}, latency.png, latency.svg")
    if perfetto:
        write_trace(found.replications.runs[0], perfetto)
        typer.echo(f"Written: {perfetto}; open it at https://ui.perfetto.dev")
    return 0


@app.command()
def plot(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Output folder of a command.")],
    what: Annotated[str, typer.Option(help="pareto, payoff, sweep, sensitivity, latency or breakdown.")] = "pareto",
) -> int:
    """Draw a picture of what is in a folder: PNG and SVG."""
    from breakeven.studies.redraw import draw
    from breakeven.studies.run import remember_compiled

    remember_compiled()
    path = draw(folder, what)
    typer.echo(f"Written: {path} and {path.with_suffix('.svg')}")
    return 0


@app.command()
def catalog(
    what: Annotated[str, typer.Argument(metavar="accelerators|llms|links|prices|workloads|topologies|support")],
    fit: Annotated[Path | None, typer.Option(metavar="TRACE", help="workloads: fit one to a trace.")] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="The trace's format (default: told from the file).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the fitted workload here, and fit.png beside it.")] = None,
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help="Leave malformed rows out.")] = False,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME=VALUE", help="As in a study's workload: time_unit=s; repeatable."),
    ] = None,
) -> int:
    """List what the catalogue holds, with what is only recalled or disputed marked; or fit a workload to a trace."""
    from breakeven.models.inputs import pick
    from breakeven.studies.catalog_tables import TABLES
    from breakeven.studies.console import screen

    given = (fit, format_, out, skip_bad_rows or None, option)
    if what == "workloads" and fit is not None:
        from breakeven.studies.fitted import fit_file

        return fit_file(fit, format_, out, skip_bad_rows, option or (), screen())
    if any(value is not None for value in given):
        raise InputError(
            "--fit", None if fit is None else str(fit), "catalog workloads --fit TRACE takes these options"
        )
    screen().print(TABLES[pick("catalog", what, TABLES)]())
    return 0


questions.register(app)
handover.register(app)


MeasuredArgument = Annotated[
    Path, typer.Argument(metavar="MEASURED.csv", help="Measured serving points, runs, or the requests of runs.")
]
LabelsOption = Annotated[
    Path | None,
    typer.Option(help="InferenceX export that names speculation and workers of points; for requests, their runs."),
]


@app.command()
def validate(
    measured: MeasuredArgument,
    out: Annotated[Path | None, typer.Option(metavar="PRED.csv", help="Write predictions beside measurements.")] = None,
    labels: LabelsOption = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE.md", help="Write the tables as Markdown.")] = None,
    local_points: Annotated[
        int, typer.Option(min=0, max=100, help="Correct each deployment by so many of its points; judge the others.")
    ] = 0,
) -> int:
    """Predict measured serving points: errors by metric, model, system, backend, mode and concurrency."""
    from breakeven.studies.accuracy import markdown as tables_of
    from breakeven.studies.accuracy import show_validation
    from breakeven.studies.console import screen
    from breakeven.studies.run import remember_compiled
    from breakeven.studies.runs import is_table_of_runs
    from breakeven.studies.validate import validate as validate_points

    remember_compiled()
    if is_table_of_runs(measured):
        return _validate_runs(measured, labels, local_points, out, markdown)
    table = validate_points(measured, labels, local_points)
    if out is not None:
        _write(table.to_csv(index=False, float_format="%.6g"), out, "--out")
    if markdown is not None:
        _write(tables_of(table), markdown, "--markdown")
    show_validation(table, screen())
    return 0 if "" in set(table["excluded"]) else NOTHING


def _validate_runs(
    measured: Path, labels: Path | None, local_points: int, out: Path | None, markdown: Path | None
) -> int:
    """`validate` of a table of runs or of their requests: each is played again."""
    from breakeven.studies.console import screen
    from breakeven.studies.validate_runs import markdown as tables_of
    from breakeven.studies.validate_runs import show, validate_runs

    if local_points:
        raise InputError("--local-points", local_points, "only with measured serving points, not with runs")
    table = validate_runs(measured, labels)
    if out is not None:
        _write(table.to_csv(index=False, float_format="%.6g"), out, "--out")
    if markdown is not None:
        _write(tables_of(table), markdown, "--markdown")
    show(table, screen())
    return 0 if "" in set(table["excluded"]) else NOTHING


def _write(text: str, path: Path, option: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(option, str(path), f"cannot be written: {error.strerror}") from None


@app.command()
def calibrate(
    measured: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="KERNELS...|MEASURED.csv",
            help="Tables of kernels or their folder; or serving points; with --local, the deployment's file.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for kernels.toml or engines.toml, and errors; with --local, the file (local.yaml)."),
    ] = None,
    labels: LabelsOption = None,
    folds: Annotated[int, typer.Option(help="Folds of (model, accelerator) combinations; 0: each on its own.")] = 0,
    local: Annotated[
        list[Path] | None,
        typer.Option(metavar="MY.csv", help="Points measured on your own system: correct its deployment; repeatable."),
    ] = None,
) -> int:
    """Fit curves of operators to measured kernels, or what engines add to measured serving points.

    The latter fit keeps the curves as they are and is judged on (model, accelerator) combinations left out. With
    --local, one deployment is corrected by a few points measured on it.
    """
    if local:
        return _calibrate_local(local, measured or [], out or Path("local.yaml"))
    if not measured:
        raise InputError("KERNELS...|MEASURED.csv", None, "is required: tables of kernels, or measured serving points")
    from breakeven.studies.accuracy import calibration_markdown, kernels_markdown, show_calibration, show_kernels
    from breakeven.studies.calibrated import calibrate as fit_points
    from breakeven.studies.console import screen
    from breakeven.studies.kernel_fit import fit_kernels, save_kernels
    from breakeven.studies.kernels import is_kernel_table, read_kernels
    from breakeven.studies.measured_files import read_points
    from breakeven.studies.run import remember_compiled

    folder = writable(out) if out is not None else None
    remember_compiled()
    if len(measured) > 1 or is_kernel_table(measured[0]):
        samples, left = read_kernels(measured)
        curves = fit_kernels(samples)
        if folder is not None:
            save_kernels(curves, folder)
            _write(kernels_markdown(curves), folder / "kernels.md", "--out")
        show_kernels(curves, left, screen())
        return 0
    points = read_points(measured[0], labels)
    fitted = fit_points(points, folds)
    if folder is not None:
        fitted.save(folder)
        _write(calibration_markdown(fitted), folder / "left_out.md", "--out")
    show_calibration(fitted, screen())
    return 0


def _calibrate_local(files: list[Path], deployment: list[Path], out: Path) -> int:
    from breakeven.studies.console import screen
    from breakeven.studies.deployment_file import read_deployment
    from breakeven.studies.local_file import local_yaml
    from breakeven.studies.localize import calibrate_local, show_local
    from breakeven.studies.run import remember_compiled

    if len(deployment) > 1:
        raise InputError("DEPLOYMENT.yaml", str(deployment[1]), "one deployment's file at most")
    deployed = read_deployment(str(deployment[0])) if deployment else None
    remember_compiled()
    found = calibrate_local(files, deployed)
    show_local(found, screen())
    _write(local_yaml(found.corrections), out, "--out")
    typer.echo(f"Written: {out}; explain, simulate and run take it as --local {out}")
    return 0


def main(arguments: list[str] | None = None) -> None:
    """Entry point: turns every fault into one line and an exit status."""
    sys.exit(_main(arguments))


def _main(arguments: list[str] | None) -> int:
    try:
        return int(app(args=arguments, standalone_mode=False) or 0)
    except typer.Exit as end:
        return end.exit_code
    except (InputError, TyperException) as error:
        return _say(str(error), BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("BREAKEVEN_TRACEBACK"):
            raise
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return _say(f"a fault of breakeven's own: {text} (BREAKEVEN_TRACEBACK=1 shows where)", OUR_FAULT)


def _say(text: str, status: int) -> int:
    print(f"breakeven: {text}", file=sys.stderr)
    return status
