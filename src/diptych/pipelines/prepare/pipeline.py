"""`prepare`: from raw samples to shards, a processor and what every sample costs."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from diptych.data.bucket import bucket
from diptych.data.costs import measure
from diptych.data.indexing.index import index
from diptych.data.processor import fit
from diptych.data.shards.shard import shard
from diptych.data.sources import gather
from diptych.runner import ALWAYS


def create_pipeline() -> Pipeline:
    """Return the pipeline's own nodes in reading order."""
    return Pipeline(
        [
            Node(
                gather,
                inputs="params:prepare.sources",
                outputs="raw_samples",
                name="gather",
                # It notices raw files that changed; the same files change nothing downstream.
                tags=ALWAYS,
            ),
            Node(
                index,
                inputs=[
                    "raw_samples",
                    "params:prepare.index",
                    "params:folders.sample_index",
                    "params:prepare.executor",
                ],
                outputs=["sample_index", "quarantine"],
                name="index",
            ),
            Node(
                bucket,
                inputs=["sample_index", "params:prepare.buckets"],
                outputs="buckets",
                name="bucket",
            ),
            Node(
                shard,
                inputs=[
                    "sample_index",
                    "raw_samples",
                    "quarantine",
                    "params:prepare.shards",
                    "params:folders.shards",
                    "params:prepare.executor",
                ],
                outputs=["shards", "manifest"],
                name="shard",
            ),
            Node(
                fit,
                inputs=["sample_index", "params:prepare.processor", "params:folders.processor"],
                outputs="processor",
                name="fit",
            ),
            Node(
                measure,
                inputs=["manifest", "shards", "processor", "params:folders.sample_costs"],
                outputs="sample_costs",
                name="measure",
            ),
        ]
    )
