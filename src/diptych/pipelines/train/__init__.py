"""The plan and the data in; a run with its checkpoints out."""

from diptych.pipelines.train.pipeline import create_pipeline

__all__ = ["create_pipeline"]
