"""The pipelines by name: each with its own nodes and everything upstream that they need."""

from __future__ import annotations

from kedro.pipeline import Pipeline

from diptych.pipelines import evaluate, export, plan, prepare, report, train


def own_pipelines() -> dict[str, Pipeline]:
    """Return each pipeline's own nodes, tagged with the pipeline's name, in the flow's order."""
    return {
        "prepare": Pipeline(prepare.create_pipeline(), tags="prepare"),
        "plan": Pipeline(plan.create_pipeline(), tags="plan"),
        "train": Pipeline(train.create_pipeline(), tags="train"),
        "export": Pipeline(export.create_pipeline(), tags="export"),
        "evaluate": Pipeline(evaluate.create_pipeline(), tags="evaluate"),
        "report": Pipeline(report.create_pipeline(), tags="report"),
    }


def register_pipelines() -> dict[str, Pipeline]:
    """Return what `kedro run --pipelines=<name>` runs; `--tags=<name>` leaves the own nodes."""
    own = own_pipelines()
    everything = sum(own.values(), Pipeline([]))
    registered = {
        name: everything.to_nodes(*(node.name for node in pipeline.nodes))
        for name, pipeline in own.items()
    }
    return {**registered, "__default__": everything}
