"""`train`: from a plan and data to a run with its checkpoints."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from diptych.launch.launch import launch
from diptych.model.revision import pin
from diptych.runner import ALWAYS
from diptych.train.compose import compose
from diptych.train.forks import fork


def create_pipeline(*, model: str = "params:plan.model") -> Pipeline:
    """Return the pipeline's own nodes in reading order.

    Args:
        model: the entry that says what trains, and which weights it begins with.
    """
    return Pipeline(
        [
            Node(
                pin,
                inputs=model,
                outputs="model_spec",
                name="pin",
                # The weights may be others; the same weights change nothing downstream.
                tags=ALWAYS,
            ),
            Node(
                compose,
                inputs=[
                    "plan",
                    "raw_samples",
                    "manifest",
                    "processor",
                    "buckets",
                    "model_spec",
                    "params:train",
                    "params:folders",
                ],
                outputs="run_draft",
                name="compose",
            ),
            Node(
                fork,
                inputs=[
                    "run_draft",
                    "params:train.fork_from",
                    "params:train.fork_keeps",
                    "params:folders.runs",
                ],
                outputs="run_spec",
                name="fork",
                # The newest checkpoint may be another; the same one changes nothing downstream.
                tags=ALWAYS,
            ),
            Node(
                launch,
                inputs=["run_spec", "sample_costs", "shards", "params:folders.runs"],
                outputs="run",
                name="launch",
            ),
        ]
    )
