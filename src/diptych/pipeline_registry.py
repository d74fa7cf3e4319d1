"""The pipelines by name: each with its own nodes and everything upstream that they need.

In: the names of the stages that the configuration has, in their order; Kedro asks for pipelines
without telling which configuration is meant, so the context tells it (`use_stages`). Out: the six
pipelines, and one for each stage. A stage is the nodes of `plan`, `train` and `export` once more,
under its own namespace, with the entries of `prepare` and the machine shared.
"""

from __future__ import annotations

from collections.abc import Sequence

from kedro.framework.project import pipelines
from kedro.pipeline import Node, Pipeline

from diptych.model.inherit import inherit
from diptych.pipelines import evaluate, export, plan, prepare, report, train

_NAMESPACE = "stages"
_MODEL, _MODEL_START = "params:plan.model", "model_start"
_BEFORE = ("release_before", "parity_before")
_SHARED_NODES = ("survey", "show")
"""Nodes of `plan` that say the same for every stage."""

_in_use: list[str] = []


def use_stages(names: Sequence[str]) -> None:
    """Say which stages the configuration has, so that Kedro's pipelines are those with them."""
    if _in_use != list(names):
        _in_use[:] = names
        pipelines.configure(__name__)


def own_pipelines(stages: Sequence[str] = ()) -> dict[str, Pipeline]:
    """Return each pipeline's own nodes, tagged with the pipeline's name, in the flow's order.

    Args:
        stages: names of trainings before the main one, in their order.
    """
    begun = [None, *stages[:-1]]
    return {
        "prepare": Pipeline(prepare.create_pipeline(), tags="prepare"),
        "plan": Pipeline(plan.create_pipeline(), tags="plan"),
        **{name: _stage(name, last=last) for name, last in zip(stages, begun, strict=False)},
        "train": Pipeline(_train(last=stages[-1] if stages else None), tags="train"),
        "export": Pipeline(export.create_pipeline(), tags="export"),
        "evaluate": Pipeline(evaluate.create_pipeline(), tags="evaluate"),
        "report": Pipeline(report.create_pipeline(), tags="report"),
    }


def register_pipelines() -> dict[str, Pipeline]:
    """Return what `kedro run --pipelines=<name>` runs; `--tags=<name>` leaves the own nodes."""
    own = own_pipelines(_in_use)
    everything = sum(own.values(), Pipeline([]))
    registered = {
        name: everything.to_nodes(*(node.name for node in pipeline.nodes))
        for name, pipeline in own.items()
    }
    return {**registered, "__default__": everything}


def _train(*, last: str | None) -> Pipeline:
    """Return the main training's nodes, which begin with the release of the last stage, if any."""
    if last is None:
        return train.create_pipeline()
    # Kedro keeps names with dots for nodes within a namespace.
    begin = Pipeline(
        [_begin()],
        inputs=_released(last),
        outputs={_MODEL_START},
        parameters={_MODEL},
        namespace=_NAMESPACE,
    )
    return begin + train.create_pipeline(model=_MODEL_START)


def _stage(name: str, *, last: str | None) -> Pipeline:
    planned = [node for node in plan.create_pipeline().nodes if node.name not in _SHARED_NODES]
    begin = [] if last is None else [_begin()]
    trained = train.create_pipeline(model=_MODEL if last is None else _MODEL_START)
    own = Pipeline([*planned, *begin, trained, export.create_pipeline()])
    shared = {entry: entry for entry in own.inputs() if not entry.startswith("params:")}
    return Pipeline(
        own,
        inputs=shared if last is None else shared | _released(last),
        parameters={"params:folders"},
        namespace=f"{_NAMESPACE}.{name}",
        tags=name,
    )


def _begin() -> Node:
    return Node(inherit, inputs=[_MODEL, *_BEFORE], outputs=_MODEL_START, name=inherit.__name__)


def _released(stage: str) -> dict[str, str]:
    """Map what `_begin` reads to what a stage makes."""
    entries = (f"{_NAMESPACE}.{stage}.{entry}" for entry in ("release", "parity"))
    return dict(zip(_BEFORE, entries, strict=True))
