"""`report`: from everything that was made to one page and one file of numbers."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from diptych.report.examples import pick
from diptych.report.figures import plot
from diptych.report.lineage import trace
from diptych.report.page import draw, summarise


def create_pipeline() -> Pipeline:
    """Return the pipeline's own nodes in reading order."""
    return Pipeline(
        [
            Node(
                trace,
                inputs=[
                    "raw_samples",
                    "manifest",
                    "model_shape",
                    "run_spec",
                    "run",
                    "parity",
                    "scores",
                ],
                outputs="lineage",
                name="trace",
            ),
            Node(
                pick, inputs=["predictions", "manifest", "shards"], outputs="examples", name="pick"
            ),
            Node(plot, inputs=["run", "scores"], outputs=["loss_curve", "score_bars"], name="plot"),
            Node(
                summarise,
                inputs=["run", "manifest", "parity", "scores", "release"],
                outputs="summary",
                name="summarise",
            ),
            Node(
                draw,
                inputs=[
                    "summary",
                    "lineage",
                    "plan",
                    "scores",
                    "examples",
                    "manifest",
                    "sample_costs",
                    "data_section",
                ],
                outputs="report",
                name="draw",
            ),
        ]
    )
