"""All parameters in one tree, checked before any node runs.

In: what the YAML files and `--params` say. Out: frozen sections, or one `ConfigError` that names
every wrong parameter with the nearest right one. The sections live beside the functions that take
them; here they are only put together, as the files in `conf/base/` are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator

from diptych.core.errors import ConfigError, nearest
from diptych.core.records import ModelSpec, Section
from diptych.data.bucket import BucketParams
from diptych.data.executor import ExecutorParams
from diptych.data.indexing.index import IndexParams
from diptych.data.processor import ProcessorParams
from diptych.data.shards.shard import ShardParams
from diptych.data.sources import SourceParams
from diptych.evaluate.score import EvaluateParams
from diptych.export.write import ExportParams
from diptych.plan.hardware import ClusterParams
from diptych.plan.search import LayoutParams
from diptych.staging import StageParams, resolve_stages, says, stage_problems
from diptych.train.compose import Folders, TrainParams, check_freeze

_QUOTED = re.compile("'([^']*)'")


class PrepareParams(Section):
    """`prepare` in the parameters."""

    sources: dict[str, SourceParams]
    executor: ExecutorParams = ExecutorParams()
    index: IndexParams = IndexParams()
    buckets: BucketParams = BucketParams()
    shards: ShardParams = ShardParams()
    processor: ProcessorParams = ProcessorParams()

    @field_validator("sources", mode="before")
    @classmethod
    def _drop_absent(cls, sources: Any) -> Any:
        # A recipe sets a source of the base to null to leave it out.
        if not isinstance(sources, Mapping):
            return sources
        return {name: source for name, source in sources.items() if source is not None}


class PlanParams(Section):
    """`plan` in the parameters."""

    model: ModelSpec = ModelSpec()
    cluster: ClusterParams = ClusterParams()
    layout: LayoutParams = LayoutParams()


class ReportParams(Section):
    """`report` in the parameters."""


class Parameters(Section):
    """Every top-level key that the parameter files may have."""

    folders: Folders
    prepare: PrepareParams
    plan: PlanParams = PlanParams()
    train: TrainParams = TrainParams()
    export: ExportParams = ExportParams()
    evaluate: EvaluateParams = EvaluateParams()
    report: ReportParams = ReportParams()
    stages: dict[str, StageParams] = Field(default_factory=dict)

    @field_validator("export")
    @classmethod
    def _check_mean(cls, export: ExportParams, info: ValidationInfo) -> ExportParams:
        train = info.data.get("train")
        if export.weights == "ema" and train is not None and train.ema_decay is None:
            raise ValueError(
                "weights is ema, and train.ema_decay is null, so that no mean of the weights is "
                "kept; set train.ema_decay, such as 0.999, or export.weights to trained"
            )
        return export


def check(
    raw: Mapping[str, Any], *, runtime: Mapping[str, Any], stages: Sequence[str] | None = None
) -> Parameters:
    """Turn the parameters' plain values into sections.

    Args:
        raw: The merged parameters of the YAML files and of `--params`.
        runtime: Those of `--params` alone; Kedro drops the top-level keys it doesn't know.
        stages: The stages that the files name; None takes those of `raw`.

    Raises:
        ConfigError: parameters that are unknown or ill-typed; names them all.
    """
    unknown = {name: value for name, value in runtime.items() if name not in raw}
    problems = stage_problems(raw, names=stages)
    whole = {**raw, **unknown, "stages": resolve_stages(raw)}
    try:
        checked = Parameters.model_validate(whole)
        if not problems:
            _check_stages(checked)
            return checked
    except ValidationError as error:
        allowed = tuple(_dotted_names(Parameters, value=whole))
        details = _own(error.errors(), raw=raw)
        problems += [_problem(dict(detail), allowed=allowed) for detail in details]
    raise ConfigError(
        "Some parameters cannot be used:\n"
        + "\n".join(f"  - {problem}" for problem in sorted(problems)),
        cure="\nThey are set in conf/base/parameters*.yml, in conf/<--env>/ and by --params",
    )


def _check_stages(checked: Parameters) -> None:
    """Refuse now what a later stage would be refused for once the stages before it have trained."""
    if not checked.stages:
        return
    for name, stage in checked.stages.items():
        try:
            check_freeze(stage.plan.model, train=stage.train)
        except ConfigError as error:
            found = f"In the stage '{name}': {error.found}"
            raise ConfigError(found, allowed=error.allowed, cure=error.cure) from error
    check_freeze(checked.plan.model, train=checked.train)


def _own(details: Sequence[Any], *, raw: Mapping[str, Any]) -> list[Any]:
    """Leave out what a stage has from a main section that is told of anyway."""
    main = [detail for detail in details if detail["loc"][0] != "stages"]
    told = {detail["loc"] for detail in main}
    return main + [
        detail
        for detail in details
        if detail["loc"][0] == "stages"
        and (detail["loc"][2:] not in told or says(raw, path=detail["loc"]))
    ]


def _problem(detail: dict[str, Any], *, allowed: tuple[str, ...]) -> str:
    name = ".".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        return f"'{name}' is unknown. {_hint(name, allowed=_alike(name, allowed=allowed))}"
    if detail["type"] == "missing":
        return f"'{name}' is missing."
    if detail["type"] == "value_error":
        # Our own checks say what they found; the input may be a whole section, or hold a secret.
        return f"'{name}': {detail['msg'].removeprefix('Value error, ')}."
    hint = ""
    if detail["type"] == "literal_error":
        choices = _QUOTED.findall(detail["ctx"]["expected"])
        close = nearest(str(detail["input"]), allowed=choices)
        hint = f" {close}" if close.startswith("Did") else ""
    return f"'{name}' is {detail['input']!r}: {detail['msg']}.{hint}"


def _alike(name: str, *, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Keep the names within stages for a name within a stage, and the others for the others."""
    return tuple(other for other in allowed if (other[:7] == "stages.") == (name[:7] == "stages."))


def _hint(name: str, *, allowed: tuple[str, ...]) -> str:
    """Name a field of that name elsewhere, or a like name, or all names of the same section."""
    section, _, field = name.rpartition(".")
    same = [other for other in allowed if other.rpartition(".")[2] == field]
    hint = nearest(name, allowed=same or allowed)
    if hint.startswith("Did"):
        return hint
    return nearest(name, allowed=(other for other in allowed if other.startswith(f"{section}.")))


def _dotted_names(model: type[BaseModel], *, value: Any, prefix: str = "") -> Iterator[str]:
    """List the names of a section's fields and of the sections within it."""
    for field, info in model.model_fields.items():
        name = f"{prefix}{field}"
        yield name
        inner = info.annotation
        given = value.get(field) if isinstance(value, Mapping) else None
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _dotted_names(inner, value=given, prefix=f"{name}.")
        elif isinstance(given, Mapping):
            section = _section_of_values(inner)
            for key in given if section else ():
                assert section is not None
                yield from _dotted_names(section, value=given[key], prefix=f"{name}.{key}.")


def _section_of_values(annotation: Any) -> type[BaseModel] | None:
    arguments = getattr(annotation, "__args__", ())
    inner = arguments[-1] if arguments else None
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None
