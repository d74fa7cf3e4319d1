"""`evaluate`: from a proven release and held-out samples to scores and answers."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from diptych.evaluate.score import score


def create_pipeline() -> Pipeline:
    """Return the pipeline's own nodes in reading order."""
    return Pipeline(
        [
            Node(
                score,
                inputs=["release", "parity", "manifest", "shards", "buckets", "params:evaluate"],
                outputs=["scores", "predictions"],
                name="score",
            ),
        ]
    )
