"""`plan`: from a model and a machine to the layouts that can run; and the data, shown."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from diptych.model.inspect import inspect
from diptych.plan.hardware import survey
from diptych.plan.search import search
from diptych.report.data import show
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
                    "params:train.optimizer.kind",
                    "params:train.optimizer.towers",
                    "params:train.ema_decay",
                ],
                outputs="plan",
                name="search",
            ),
            Node(
                show,
                inputs=[
                    "manifest",
                    "shards",
                    "processor",
                    "sample_costs",
                    "quarantine",
                    "raw_samples",
                    "buckets",
                    "params:train.schedule",
                ],
                outputs=[
                    "bucket_grid",
                    "sample_lengths",
                    "image_aspects",
                    "batch_waste",
                    "data_page",
                    "data_section",
                ],
                name="show",
            ),
        ]
    )
