"""Kedro's commands for whoever watches runs: lists, live views, logs, diagnoses, profiles, checks.

All but `check` read run folders only, so they work on any machine that sees them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from kedro.framework.cli.utils import _split_params
from kedro.framework.startup import ProjectMetadata

if TYPE_CHECKING:
    from diptych.core.records import RunRow
    from diptych.monitor.log_tail import LogTail

_PATH = click.Path(path_type=Path, file_okay=False)
_LOOK_S = 0.5


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add what says where runs are looked for."""
    env = click.option("--env", default=None, help="The configuration whose runs are meant.")
    runs = click.option("--runs", default=None, type=_PATH, help="The folder of runs.")
    return click.pass_obj(env(runs(function)))


@click.command("runs")
@_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one list of all runs.")
def list_runs(metadata: ProjectMetadata, env: str | None, runs: Path | None, as_json: bool) -> None:
    """List runs, the one that moved last first: state, step, losses, where they are."""
    from diptych.drawing import make_console, problems, runs_table
    from diptych.monitor.runs import list_runs

    folders = run_folders(metadata, runs=runs, env=env)
    rows = list_runs(folders)
    if as_json:
        click.echo(json.dumps([row.model_dump(mode="json") for row in rows], indent=1))
        return
    if not rows:
        click.echo(f"There is no run in {', '.join(map(str, folders))}")
        return
    console = make_console()
    console.print(runs_table(rows, width=console.width))
    for line in problems(rows):
        console.print(line, markup=False, style="red", soft_wrap=True)


@click.command()
@click.argument("run")
@_options
def watch(metadata: ProjectMetadata, env: str | None, runs: Path | None, run: str) -> None:
    """Watch RUN (the beginning of its name, or newest) until it ends, or until Ctrl-C."""
    from diptych.drawing import make_console
    from diptych.monitor.runs import find_run
    from diptych.watching import watch

    row = find_run(run, folders=run_folders(metadata, runs=runs, env=env))
    try:
        row = watch(row, console=make_console())
    except KeyboardInterrupt:
        click.echo(f"run {row.run_id} is no longer watched")
        return
    if row.problem:
        click.echo(f"run {row.run_id} is {row.state}: {row.problem}")


@click.command()
@_options
@click.option("--host", default="127.0.0.1", help="The address to serve; 127.0.0.1 if not given.")
@click.option("--port", default=8421, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--browser/--no-browser", default=True, help="Whether a browser is opened.")
def dashboard(
    metadata: ProjectMetadata,
    env: str | None,
    runs: Path | None,
    host: str,
    port: int,
    browser: bool,
) -> None:
    """Serve a page over all runs on this machine: curves, phases, devices, settings, answers."""
    from diptych.serving import serve

    evaluation = None if runs is not None else _evaluation_files(metadata, env=env)
    folders = run_folders(metadata, runs=runs, env=env)
    serve(folders, evaluation=evaluation, host=host, port=port, opens_browser=browser)


@click.command()
@click.argument("run")
@_options
@click.option("--wait", is_flag=True, help="Wait until it has ended.")
def stop(
    metadata: ProjectMetadata, env: str | None, runs: Path | None, run: str, wait: bool
) -> None:
    """Have RUN save a checkpoint and end; what waits for a place in a cluster is taken back."""
    from diptych.launch.stopping import request_stop, wait_for_end
    from diptych.monitor.runs import find_run

    row = find_run(run, folders=run_folders(metadata, runs=runs, env=env))
    click.echo(request_stop(row))
    if wait and row.goes_on:
        now = wait_for_end(row, tell=click.echo)
        click.echo(f"run {now.run_id} is {now.state} at step {now.step} of {now.num_steps}")


@click.command()
@click.argument("run")
@_options
@click.option("--rank", default=0, type=click.IntRange(min=0), help="Of which rank; the first.")
@click.option("--all", "of_all", is_flag=True, help="Of all ranks, merged by time.")
@click.option("--launch", default=None, type=int, help="Of an earlier start of the ranks.")
@click.option("--tail", default=None, type=click.IntRange(min=0), help="Only so many last lines.")
@click.option("--follow", is_flag=True, help="Go on until the run ends, or until Ctrl-C.")
def logs(
    metadata: ProjectMetadata, env: str | None, runs: Path | None, run: str, **options: Any
) -> None:
    """Show what a rank of RUN printed."""
    from diptych.monitor.runs import find_run

    row = find_run(run, folders=run_folders(metadata, runs=runs, env=env))
    try:
        show_logs(Path(row.folder), **options)
    except KeyboardInterrupt:
        return


@click.command()
@click.argument("run")
@_options
@click.option("--steps", default=None, help="Only so many, as in 100:200; all without it.")
@click.option("--against", default=None, help="Another run, to compare with.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def diagnose(
    metadata: ProjectMetadata, env: str | None, runs: Path | None, run: str, **options: Any
) -> None:
    """Say what bounds RUN, by which numbers, and what to change; also while it goes on."""
    from diptych import diagnosing
    from diptych.drawing import make_console
    from diptych.monitor.runs import find_run

    folders = run_folders(metadata, runs=runs, env=env)
    steps = diagnosing.parse_steps(options["steps"])
    observed = diagnosing.observe(find_run(run, folders=folders))
    diagnosis, comparison = observed.diagnose(steps=steps), None
    if options["against"] is not None:
        other = diagnosing.observe(find_run(options["against"], folders=folders))
        comparison = diagnosing.compare_runs(observed, against=other, steps=steps)
    if options["as_json"]:
        click.echo(diagnosing.to_json(diagnosis, comparison=comparison))
        return
    console = make_console()
    console.print(diagnosing.draw_diagnosis(diagnosis))
    if comparison is not None:
        console.print(diagnosing.draw_comparison(comparison))


@click.command()
@click.option("--env", default=None, help="The configuration that would run.")
@click.option("--params", default="", callback=_split_params, help="Parameters, as for kedro run.")
@click.option("--ranks/--no-ranks", default=True, help="Whether ranks are started to look, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def check(
    metadata: ProjectMetadata, env: str | None, params: dict[str, Any], ranks: bool, as_json: bool
) -> None:
    """Look at all that a training would meet, without training; the exit code is 1 if it fails."""
    from diptych.checking import check_project
    from diptych.drawing import checks_table, make_console

    preflight, path = check_project(metadata.project_path, env=env, params=params, with_ranks=ranks)
    if as_json:
        click.echo(preflight.model_dump_json(indent=1))
    else:
        make_console().print(checks_table(preflight.checks))
        failed, warned = len(preflight.failed), len(preflight.warned)
        click.echo(f"{failed} failed, {warned} to look at; all of it is in {path}")
    if preflight.failed:
        sys.exit(1)


@click.command()
@click.argument("run")
@_options
@click.option("--steps", default=2, type=click.IntRange(1, 50), help="How many steps.")
@click.option("--rank", default=0, type=click.IntRange(min=0), help="Whose trace is summed up.")
@click.option("--last", is_flag=True, help="Show the newest trace that is there; ask for none.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def profile(
    metadata: ProjectMetadata, env: str | None, runs: Path | None, run: str, **options: Any
) -> None:
    """Have RUN trace some of its steps while it goes on, and sum up what they did."""
    from diptych.monitor.runs import find_run

    row = find_run(run, folders=run_folders(metadata, runs=runs, env=env))
    show_profile(row, **options)


COMMANDS = (list_runs, watch, dashboard, stop, logs, diagnose, profile, check)
"""What joins the project's commands."""


def run_folders(metadata: ProjectMetadata, *, runs: Path | None, env: str | None) -> list[Path]:
    """Return the folders of runs: the one named, else the project's and those of its stages."""
    if runs is not None:
        return [runs]
    from diptych.session import Session

    project = metadata.project_path
    session = Session.create(project_path=project, env=env, save_on_close=False)
    folders = session.load_context().params["folders"]
    stages = sorted((project / folders.stages).glob("*/runs"))
    return [_short(folder) for folder in (project / folders.runs, *stages)]


def show_profile(row: RunRow, *, steps: int, rank: int, last: bool, as_json: bool) -> None:
    """Print what a trace of a run says.

    Raises:
        RunError: the run does not go on, or there is no such rank's trace.
    """
    from diptych.core.errors import RunError
    from diptych.drawing import make_console
    from diptych.monitor.traces import find_traces, summarise
    from diptych.profiling import ask_profile, draw_summary

    tell = partial(click.echo, err=as_json)
    traces = Path(row.folder) / "traces"
    found = find_traces(traces) if last else ask_profile(row, num_steps=steps, tell=tell)
    if rank not in found:
        raise RunError(
            f"Rank {rank} has written no trace",
            allowed=f"Traces of ranks {', '.join(map(str, found))}",
            cure="Name one of them with --rank",
        )
    summary = summarise(found[rank])
    if as_json:
        click.echo(summary.model_dump_json(indent=1))
        return
    console = make_console()
    for part in draw_summary(summary):
        console.print(part, soft_wrap=isinstance(part, str))


def _evaluation_files(metadata: ProjectMetadata, *, env: str | None) -> dict[str, Path]:
    """Return where the catalog has the files of an evaluation."""
    from diptych.session import Session

    project = metadata.project_path
    session = Session.create(project_path=project, env=env, save_on_close=False)
    catalog = session.load_context().config_loader["catalog"]
    names = ("parity", "scores", "predictions", "examples")
    return {name: project / catalog[name]["filepath"] for name in names}


def show_logs(
    run: Path, *, rank: int, of_all: bool, launch: int | None, tail: int | None, follow: bool
) -> None:
    """Print the logs of a run's ranks, and what they gain if they are followed.

    Raises:
        RunError: there is no such launch, or no such rank; says which there are.
    """
    from diptych.monitor.log_show import find_logs, read_lines
    from diptych.monitor.log_tail import LogTail

    found = find_logs(run, launch=launch)
    paths = {each: found.path(each) for each in (found.ranks if of_all else (rank,))}
    # Followed from where the part before ends; else it is shown to the very end.
    reader = LogTail(found.folder, begin="now") if follow else None
    ends = {
        each: path.stat().st_size if reader is None else reader.position(each)
        for each, path in paths.items()
    }
    _print_merged(
        [(each, read_lines(paths[each], num_lines=tail, end=ends[each])) for each in paths],
        names_ranks=of_all,
    )
    if reader is not None:
        _follow(reader, run=run, rank=None if of_all else rank)


def _print_merged(parts: list[tuple[int, Iterator[bytes]]], *, names_ranks: bool) -> None:
    from diptych.monitor.log_show import merge_lines

    for rank, data in merge_lines(parts):
        _print(data, rank=rank if names_ranks else None)


def _follow(reader: LogTail, *, run: Path, rank: int | None) -> None:
    """Print what logs gain until the run ends; of one rank, or of all."""
    from diptych.monitor.runs import read_row

    goes_on = True
    while goes_on:
        goes_on = read_row(run).goes_on
        for line in reader.read():
            if rank is None or line.rank == rank:
                _print(line.text.encode(), rank=line.rank if rank is None else None)
        sys.stdout.flush()
        time.sleep(_LOOK_S)


def _print(data: bytes, *, rank: int | None) -> None:
    """Print a line: as it is into a pipe, harmless onto a terminal."""
    from diptych.core.terminal import plain

    text = data.decode("utf-8", errors="replace")
    prefix = "" if rank is None else f"[rank {rank}] "
    sys.stdout.write(f"{prefix}{plain(text) if sys.stdout.isatty() else text}\n")


def _short(path: Path) -> Path:
    """Return a path relative to where the command runs, if it lies below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
