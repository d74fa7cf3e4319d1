"""`plan`: from a model and a machine to the layouts that can run, best first."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from diptych.model.inspect import inspect
from diptych.plan.hardware import survey
from diptych.plan.search import search
from diptych.runner import ALWAYS


def create_pipeline() -> Pipeline:
    """Return the pipeline's own nodes in reading order."""
    return Pipeline(
        [
            Node(inspect, inputs="params:plan.model", outputs="model_shape", name="inspect"),
            Node(
                survey,
                inputs="params:plan.cluster",
                outputs="cluster",
                name="survey",
                # The machine may be another one; the same machine changes nothing downstream.
                tags=ALWAYS,
            ),
            Node(
                search,
                inputs=[
                    "model_shape",
                    "cluster",
                    "sample_costs",
                    "params:train.schedule",
                    "params:plan.layout",
                ],
                outputs="plan",
                name="search",
            ),
        ]
    )
