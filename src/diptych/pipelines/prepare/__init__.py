"""Raw samples in; shards, manifest, processor and every sample's costs out."""

from diptych.pipelines.prepare.pipeline import create_pipeline

__all__ = ["create_pipeline"]
