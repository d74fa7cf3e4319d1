"""A release and held-out samples in; scores and every answer out."""

from diptych.pipelines.evaluate.pipeline import create_pipeline

__all__ = ["create_pipeline"]
