"""A run in; a release that transformers loads, and the proof that it computes the same, out."""

from diptych.pipelines.export.pipeline import create_pipeline

__all__ = ["create_pipeline"]
