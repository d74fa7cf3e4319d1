"""`kedro sweep`: one run for each combination of values, and a table of how they ended.

In: assignments such as `train.optimizer.lr=1e-3,3e-3`. Out: the runs' folders. What a run needs
upstream is made as `kedro run` makes it; of the catalog's entries, `run_spec` is left as the last
combination has it, and `run` is left alone.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from diptych.core.errors import ConfigError, RunError
from diptych.core.hashing import sha256_json
from diptych.core.records import RunSpec
from diptych.monitor.run_folder import RunFolder
from diptych.session import Session

_MAX_RUNS = 1000


@dataclass(frozen=True)
class Combination:
    """Values of the swept settings, by dotted path, and the run that they make."""

    values: dict[str, Any]
    spec: RunSpec


@dataclass(frozen=True)
class Swept:
    """What all runs of a sweep have in common: where data and runs are."""

    combinations: tuple[Combination, ...]
    sample_costs: Path
    shards: Path
    runs: str


def sweep(project: Path, assignments: Sequence[str], *, env: str | None, at_once: int) -> bool:
    """Train every combination, and print the table.

    Args:
        project: the project's folder.
        assignments: each `path=value,value`.
        env: the recipe.
        at_once: how many tasks of an array may run at the same time; 0 leaves that to Slurm.

    Returns:
        Whether all of them are finished.

    Raises:
        ConfigError: an assignment is none, or what it asks for cannot be.
    """
    settings = [read_assignment(text) for text in assignments]
    with contextlib.chdir(project):
        swept = compose_all(project, settings, env=env)
        _launch_all(swept, at_once=at_once)
        return show(swept)


def read_assignment(text: str) -> tuple[str, list[Any]]:
    """Read `path=value,value`; a value is YAML, and a comma within brackets is part of it.

    Raises:
        ConfigError: it is not of that form.
    """
    path, equals, values = text.partition("=")
    try:
        found = [_value(part) for part in _split(values)]
    except (yaml.YAMLError, ValueError):
        found = []
    if not equals or not path.strip() or not found or None in found:
        raise ConfigError(
            f"'{text}' names no values to sweep over",
            allowed="A setting, an equals sign, and values with commas between them",
            cure='For example: kedro sweep "train.optimizer.lr=1e-3,3e-3" "train.seed=0,1"',
        )
    return path.strip(), found


def combine(settings: Sequence[tuple[str, list[Any]]]) -> list[dict[str, Any]]:
    """Return every combination of the settings' values, the last setting changing first.

    Raises:
        ConfigError: a setting is named twice, or there are too many combinations.
    """
    names = [name for name, _ in settings]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"A setting is named twice: {', '.join(names)}",
            cure="Write all of its values behind one equals sign",
        )
    combinations = [
        dict(zip(names, values, strict=True))
        for values in itertools.product(*(values for _, values in settings))
    ]
    if len(combinations) > _MAX_RUNS:
        raise ConfigError(
            f"These are {len(combinations)} runs", allowed=f"At most {_MAX_RUNS} in one sweep"
        )
    return combinations


def compose_all(
    project: Path, settings: Sequence[tuple[str, list[Any]]], *, env: str | None
) -> Swept:
    """Make the run spec of every combination, with what it needs upstream.

    Raises:
        ConfigError: a setting is unknown; or it changes nothing, or where runs lie.
    """
    made: list[Combination] = []
    catalog: Any = None
    runs: set[str] = set()
    for values in combine(settings):
        session = Session.create(
            project_path=project, env=env, runtime_params=nested(values), save_on_close=False
        )
        session.run(pipeline_names=["train"], to_nodes=["fork"])
        context = session.load_context()
        catalog = context.catalog
        runs.add(context.params["folders"].runs)
        made.append(Combination(values=values, spec=catalog.load("run_spec")))
    by_run = {each.spec.run_id: each for each in made}
    if len(by_run) < len(made) or len(runs) > 1:
        raise ConfigError(
            f"{len(made)} combinations are {len(by_run)} runs in {len(runs)} folders",
            allowed="A run is named by what it trains: settings of plan.layout, of train.launch or "
            "of checkpoints make no other run",
            cure="Sweep over settings of the training, such as train.optimizer.lr or train.seed",
        )
    return Swept(tuple(made), catalog.load("sample_costs"), catalog.load("shards"), runs.pop())


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Turn dotted paths into sections within sections, as `--params` does."""
    sections: dict[str, Any] = {}
    for path, value in values.items():
        section = sections
        *parents, name = path.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    return sections


def show(swept: Swept) -> bool:
    """Print a table of the runs, the best last loss first; return whether all are finished."""
    every = swept.combinations
    names = _varied([each.values for each in every])
    table = Table("run", *_short(names), "state", "step", "loss", "held-out loss")
    runs = Path(swept.runs)
    rows = [_row(each, names=names, folder=RunFolder(runs / each.spec.run_id)) for each in every]
    for row in sorted(rows, key=lambda row: row.score):
        table.add_row(*row.cells)
    Console().print(table)
    return all(row.state == "finished" for row in rows)


@dataclass(frozen=True)
class _Row:
    score: float
    state: str
    cells: list[str]


def _row(each: Combination, *, names: Sequence[str], folder: RunFolder) -> _Row:
    steps = folder.read_steps()
    last, loss = (steps[-1].step, steps[-1].loss) if steps else (0, None)
    measured = [step.heldout_loss for step in steps if step.heldout_loss is not None]
    heldout = measured[-1] if measured else None
    state = "finished" if folder.read_run() else folder.read_status().get("state", "no start")
    values = [str(each.values[name]) for name in names]
    place = f"{last}/{each.spec.identity.num_steps}"
    cells = [each.spec.run_id, *values, state, place, _number(loss), _number(heldout)]
    found = next((score for score in (heldout, loss) if score is not None), float("inf"))
    return _Row(found, state, cells)


def _launch_all(swept: Swept, *, at_once: int) -> None:
    specs = [each.spec for each in swept.combinations]
    if all(spec.placement.launch.kind == "slurm" for spec in specs):
        from diptych.launch.array import launch_array

        name = sha256_json([spec.run_id for spec in specs])[:12]
        folder = Path(swept.runs).with_name("sweeps") / name
        launch_array(specs, runs=Path(swept.runs), folder=folder, at_once=at_once or None)
        return
    _launch_each(swept)


def _launch_each(swept: Swept) -> None:
    """Train one run after the other; one that fails does not keep the others from theirs."""
    from diptych.launch.launch import launch

    console = Console(stderr=True)
    for number, each in enumerate(swept.combinations, start=1):
        title = ", ".join(f"{name}={value}" for name, value in each.values.items())
        console.print(f"run {number} of {len(swept.combinations)}: {title}", highlight=False)
        try:
            launch(each.spec, swept.sample_costs, swept.shards, swept.runs)
        except RunError as error:
            folder = RunFolder(Path(swept.runs) / each.spec.run_id)
            if folder.read_status().get("state") != "failed":
                raise  # stopped by a person, or not even started
            console.print(str(error), markup=False, highlight=False)


def _split(values: str) -> list[str]:
    """Split at commas outside of brackets and quotation marks, by YAML's own rules."""
    if not values.strip():
        return []
    loaded = yaml.compose(f"[{values}]", Loader=yaml.SafeLoader)
    text = f"[{values}]"
    return [text[node.start_mark.index : node.end_mark.index] for node in loaded.value]


def _value(text: str) -> Any:
    """Read a value as `--params` reads it: 1e-3 is a number there, which YAML 1.1 denies."""
    read = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    return read["value"] if isinstance(read, dict) else None


def _varied(combinations: Sequence[dict[str, Any]]) -> list[str]:
    """Return the settings that have several values."""
    return [
        name for name in combinations[0] if len({str(values[name]) for values in combinations}) > 1
    ]


def _short(names: Sequence[str]) -> list[str]:
    """Return the last words of dotted paths, where these are no other's."""
    last = [name.rpartition(".")[2] for name in names]
    return [word if last.count(word) == 1 else name for name, word in zip(names, last, strict=True)]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
