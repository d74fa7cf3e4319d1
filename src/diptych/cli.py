"""Kedro's commands of this project: `run` with short errors, `package`, `dvc-sync`, and others.

In: the command line. Out: what Kedro does, or an error that fits on the screen.
"""

from __future__ import annotations

import copy
import functools
import sys
import tarfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import click
import yaml
from kedro.framework.cli.project import run as kedro_run
from kedro.framework.cli.utils import KedroCliError, call
from kedro.framework.startup import ProjectMetadata

from diptych.commands import COMMANDS
from diptych.core.errors import DiptychError

_SECRET = ("local", "credentials")
"""A configuration path with one of these words in a part of it stays out of the archive."""


class ShortError(KedroCliError):
    """An error shown as its message; with --verbose as its traceback."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the error."""
        if self.VERBOSE_ERROR:
            click.echo("".join(traceback.format_exception(self)), err=True)
        else:
            click.secho(self.message, fg="red", err=True)


def _shortly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn an error that was made for people into a short one, however deep it lies."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except Exception as error:
            for cause in _causes(error):
                if isinstance(cause, DiptychError):
                    raise ShortError(f"{type(cause).__name__}: {cause}") from error
            raise

    return call


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _shorten(command: click.Command) -> click.Command:
    assert command.callback is not None, "Kedro's commands are functions"
    shortened = copy.copy(command)
    shortened.callback = _shortly(command.callback)
    verbose = click.Option(
        ["--verbose"],
        is_flag=True,
        expose_value=False,
        callback=lambda _context, _option, value: setattr(KedroCliError, "VERBOSE_ERROR", value),
        help="Show the traceback of an error.",
    )
    shortened.params = [*(_refuse_no_yaml(each) for each in command.params), verbose]
    return shortened


def _refuse_no_yaml(option: click.Parameter) -> click.Parameter:
    """Have an option of parameters say what is no YAML in them, such as `@3`."""
    if option.name != "params" or option.callback is None:
        return option
    read = option.callback

    def call(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        try:
            return read(context, parameter, value)
        except yaml.YAMLError as error:
            told = " ".join(str(error).split())
            context.fail(f"--params has a value that is no YAML ({told}). Put it in quotes")

    changed = copy.copy(option)
    changed.callback = call
    return changed


@click.group(name="diptych")
def cli() -> None:
    """Commands of this project."""


run = _shorten(kedro_run)
cli.add_command(run)
for command in COMMANDS:
    cli.add_command(_shorten(command))


@cli.command()
@click.pass_obj
def package(metadata: ProjectMetadata) -> None:
    """Package the project as a wheel, and its configuration without secrets as an archive."""
    folder = metadata.project_path / "dist"
    # Without isolation: setuptools is installed, and nothing is downloaded.
    call(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)],
        cwd=str(metadata.project_path),
    )
    archive_conf(
        metadata.project_path / "conf", archive=folder / f"conf-{metadata.package_name}.tar.gz"
    )


@cli.command("dvc-sync")
@click.option("--check", is_flag=True, help="Only say whether dvc.yaml is up to date.")
@click.option("--env", default="base", help="The recipe that dvc repro shall run.")
@click.pass_obj
@_shortly
def dvc_sync(metadata: ProjectMetadata, check: bool, env: str) -> None:
    """Write dvc.yaml from the pipelines and the catalog."""
    path = metadata.project_path / "dvc.yaml"
    text = stages_text(metadata.project_path, env=env)
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        click.echo("dvc.yaml is up to date")
    elif check:
        option = "" if env == "base" else f" --env={env}"
        click.echo(f"dvc.yaml differs from the pipelines: run `kedro dvc-sync{option}`", err=True)
        sys.exit(1)
    else:
        path.write_text(text, encoding="utf-8")
        click.echo("dvc.yaml is written")


@cli.command("export-energon")
@click.argument("folder", default="data/05_model_input/energon", type=click.Path(path_type=Path))
@click.option("--env", default=None, help="The configuration whose shards are meant.")
@click.pass_obj
@_shortly
def energon(metadata: ProjectMetadata, folder: Path, env: str | None) -> None:
    """Write FOLDER: links to the shards, and the files that Megatron-Energon reads them by."""
    from diptych.data.shards.energon import export_energon
    from diptych.session import Session

    session = Session.create(project_path=metadata.project_path, env=env, save_on_close=False)
    catalog = session.load_context().catalog
    manifest, shards = catalog.load("manifest"), catalog.load("shards")
    export_energon(manifest, shards=shards, folder=metadata.project_path / folder)
    click.echo(f"{folder}: {len(manifest.shards)} shards, ready for Megatron-Energon")


@cli.command("families")
def list_families() -> None:
    """List the model families that are built, and what each of them takes."""
    from diptych.families import show_families

    show_families()


@cli.command("import-deepspeed")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--env", default=None, help="Write the settings to this folder of conf/.")
@click.pass_obj
@_shortly
def import_deepspeed(metadata: ProjectMetadata, config: Path, env: str | None) -> None:
    """Read a DeepSpeed CONFIG: what it means here, what it would change, what is left out."""
    from diptych.imports import read_config, show_import, write_import
    from diptych.parameters import Parameters
    from diptych.session import Session

    found = read_config(config)
    session = Session.create(project_path=metadata.project_path, save_on_close=False)
    parameters = Parameters.model_validate(session.load_context().params)
    show_import(found, present=parameters.model_dump(mode="json"))
    if env is not None:
        for path in write_import(found, folder=metadata.project_path / "conf" / env):
            click.echo(f"{path.relative_to(metadata.project_path)} is written")
        click.echo(f"Train with it: kedro run --env={env}")


@cli.command("import-weights")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--config", default=None, type=click.Path(path_type=Path), help="Its config.json.")
@click.option("--memory-gib", default=24.0, help="What reading may take beside the files' size.")
@click.option("--minutes", default=60.0, help="How long reading may take.")
@_shortly
def weights(
    checkpoint: Path, out: Path, config: Path | None, memory_gib: float, minutes: float
) -> None:
    """Convert another trainer's CHECKPOINT (DeepSpeed, FSDP, a state dict) into the folder OUT.

    It is read by a process without network, secrets or programs, which loads tensors alone.
    """
    from diptych.core.units import format_bytes
    from diptych.model.foreign.importing import Limits, import_weights

    limits = Limits(memory_gib=memory_gib, minutes=minutes)
    found = import_weights(checkpoint, out=out, config=config, limits=limits)
    for held in found.held:
        click.echo(f"the process that read it {held}")
    for left in found.open:
        click.echo(f"NOTE: the process that read it {left}", err=True)
    before = f", of names that began with {found.prefix}" if found.prefix else ""
    click.echo(
        f"{found.form}: {found.num_tensors} tensors ({', '.join(found.dtypes)}){before}; "
        f"{found.num_left_out} that are not the model's were left out"
    )
    click.echo(f"{out} is written, {format_bytes(found.num_bytes)}")
    click.echo(f"Train from it: plan.model.weights: {out}, plan.model.sizes: null")


def archive_conf(conf: Path, *, archive: Path) -> None:
    """Write a configuration folder to an archive, without `local` and without credentials."""
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted(conf.rglob("*")):
            name = path.relative_to(conf)
            if path.is_file() and not any(
                part == _SECRET[0] or _SECRET[1] in part for part in name.parts
            ):
                tar.add(path, arcname=f"conf/{name.as_posix()}")


def stages_text(project: Path, *, env: str = "base") -> str:
    """Return what `dvc.yaml` must be for the project as it is, with the values of a recipe."""
    from diptych.parameters import Parameters
    from diptych.pipeline_registry import own_pipelines
    from diptych.session import Session
    from diptych.stages import write_stages

    session = Session.create(project_path=project, env=env, save_on_close=False)
    context = session.load_context()
    parameters = Parameters.model_validate(context.params)
    return write_stages(
        own_pipelines(tuple(parameters.stages)),
        catalog=context.catalog,
        parameters=parameters,
        root=project,
        env=env,
    )


@cli.command("sweep")
@click.argument("assignments", nargs=-1, required=True)
@click.option("--env", default=None, help="The recipe.")
@click.option("--at-once", default=0, help="So many tasks of a Slurm array at the same time.")
@click.pass_obj
@_shortly
def sweep_settings(
    metadata: ProjectMetadata, assignments: tuple[str, ...], env: str | None, at_once: int
) -> None:
    """Train a run for each combination of values: "train.optimizer.lr=1e-3,3e-3" "train.seed=0,1".

    With train.launch.kind slurm they are the tasks of one job array, else one follows the other.
    """
    from diptych.sweep import sweep

    if not sweep(metadata.project_path, assignments, env=env, at_once=at_once):
        sys.exit(1)
