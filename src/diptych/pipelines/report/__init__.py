"""Everything that was made in; one page for people and one file of numbers for scripts out."""

from diptych.pipelines.report.pipeline import create_pipeline

__all__ = ["create_pipeline"]
