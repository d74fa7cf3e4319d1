"""`export`: from a run to a release, the proof that it computes what was trained, its tracker."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from diptych.export.attach import attach
from diptych.export.verify import verify
from diptych.export.write import write


def create_pipeline() -> Pipeline:
    """Return the pipeline's own nodes in reading order."""
    return Pipeline(
        [
            Node(
                write,
                inputs=["run", "processor", "manifest", "params:export", "params:folders.release"],
                outputs="release",
                name="write",
            ),
            Node(
                verify,
                inputs=["release", "run", "params:export"],
                outputs="parity",
                name="verify",
            ),
            Node(
                attach,
                inputs=["release", "run", "parity"],
                outputs="attachment",
                name="attach",
            ),
        ]
    )
