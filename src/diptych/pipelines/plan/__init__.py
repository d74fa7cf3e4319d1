"""What to train and on which machine in; the layouts, best first, out."""

from diptych.pipelines.plan.pipeline import create_pipeline

__all__ = ["create_pipeline"]
