"""The settings of stages: trainings before the main one, each from the release of the last.

In: the parameters as the files and `--params` say them, where a stage has only what differs. Out: a
whole section per stage, and in words what is wrong with it. Which nodes a stage runs is unknown
here. (The stages of DVC are something else: `stages.py`.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diptych.core.errors import nearest
from diptych.core.records import ModelSpec, Section
from diptych.export.write import ExportParams
from diptych.plan.search import LayoutParams
from diptych.train.compose import TrainParams

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TAKEN = ("prepare", "plan", "train", "export", "evaluate", "report", "stages", "always")
"""Names of pipelines and tags, which a stage would be confused with."""

_SETS = ("plan", "train", "export")
_OF_PLAN = ("model", "layout")
_OF_MODEL = "freeze"


class StagePlan(Section):
    """What of `plan` is a stage's own; all stages run on one machine."""

    model: ModelSpec
    layout: LayoutParams


class StageFolders(Section):
    """Where a stage leaves what it makes; the catalog names the same places."""

    runs: str
    release: str


class StageParams(Section):
    """One stage: the main sections with what differs."""

    plan: StagePlan
    train: TrainParams
    export: ExportParams
    folders: StageFolders


def stage_names(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """List the stages that can be named so, in the order in which they are written."""
    return tuple(name for name in _given(raw) if _fits(name))


def resolve_stages(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Put what a stage says over the main sections; its release is fp32 unless it says otherwise.

    Args:
        raw: all parameters, not checked yet.
    """
    folders = raw.get("folders")
    root = folders.get("stages", "") if isinstance(folders, Mapping) else ""
    resolved = {}
    for name, given in _given(raw).items():
        main = {key: raw.get(key, {}) for key in _SETS}
        if isinstance(main["plan"], Mapping):
            main["plan"] = {key: main["plan"].get(key, {}) for key in _OF_PLAN}
        if isinstance(main["train"], Mapping):
            # Its runs are in a folder of its own.
            main["train"] = {key: main["train"][key] for key in main["train"] if key != "fork_from"}
        if isinstance(main["export"], Mapping):
            main["export"] = {**main["export"], "dtype": ExportParams().dtype}
        section = _over(main, _usable(given))
        section["folders"] = {"runs": f"{root}/{name}/runs", "release": f"{root}/{name}/release"}
        resolved[name] = section
    return resolved


def stage_problems(raw: Mapping[str, Any], *, names: Sequence[str] | None = None) -> list[str]:
    """Say what a stage sets that it cannot, in one sentence or two each.

    Args:
        raw: all parameters, not checked yet.
        names: the stages that the files name; None takes any.
    """
    stages = raw.get("stages")
    if stages is not None and not isinstance(stages, Mapping):
        return [f"'stages' is {stages!r}. Name each stage with what differs from the main sections"]
    return [
        problem
        for name, given in _given(raw).items()
        for problem in (_name_problems(name, names=names) or _problems(name, given=given))
    ]


def says(raw: Mapping[str, Any], *, path: Sequence[Any]) -> bool:
    """Whether a stage itself, not the main section below it, has something at a path."""
    found: Any = raw
    for part in path:
        if not isinstance(found, Mapping) or part not in found:
            return False
        found = found[part]
    return True


def _name_problems(name: str, *, names: Sequence[str] | None) -> list[str]:
    if not _fits(name):
        return [
            f"'stages.{name}': a stage has a name of its own in lower case, without dots, and "
            f"none of {', '.join(_TAKEN)}."
        ]
    if names is not None and name not in names:
        hint = nearest(name, allowed=names) or "The files name no stage."
        return [f"'stages.{name}' is unknown: --params cannot add a stage. {hint}"]
    return []


def _problems(name: str, *, given: Any) -> Iterator[str]:
    if not isinstance(given, Mapping):
        yield f"'stages.{name}' is {given!r}. A stage sets {', '.join(_SETS)}."
        return
    for key in given:
        if key not in _SETS:
            hint = nearest(key, allowed=_SETS)
            yield (
                f"'stages.{name}.{key}' is not a stage's own (a stage sets {', '.join(_SETS)}). "
                f"{hint}"
            )
    if not says(given, path=("train", "num_steps")):
        yield f"'stages.{name}' has no steps. Set stages.{name}.train.num_steps."
    if says(given, path=("plan", "cluster")):
        yield f"'stages.{name}.plan.cluster': all stages run on one machine. Set plan.cluster."
    for key in ModelSpec.model_fields:
        if key != _OF_MODEL and says(given, path=("plan", "model", key)):
            yield (
                f"'stages.{name}.plan.model.{key}': a stage trains the model that plan.model says, "
                "with the weights that the stage before it has released; of plan.model it sets "
                f"{_OF_MODEL} alone. Set plan.model.{key}, which the first stage begins with."
            )


def _usable(given: Any) -> dict[str, Any]:
    """Leave out of a stage what `stage_problems` tells of, so that nobody else does, too."""
    if not isinstance(given, Mapping):
        return {}
    kept = {key: value for key, value in given.items() if key in _SETS}
    if isinstance(kept.get("plan"), Mapping):
        kept["plan"] = {key: value for key, value in kept["plan"].items() if key != "cluster"}
    return kept


def _given(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Map the stages to what they set; one that a recipe sets to null is left out."""
    stages = raw.get("stages")
    if not isinstance(stages, Mapping):
        return {}
    return {str(name): given for name, given in stages.items() if given is not None}


def _fits(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and name not in _TAKEN


def _over(below: Any, above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees; the upper one's values win, lists whole."""
    merged = dict(below) if isinstance(below, Mapping) else {}
    for key, value in above.items():
        merged[key] = _over(merged.get(key), value) if isinstance(value, Mapping) else value
    return merged
