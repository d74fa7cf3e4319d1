"""Write a `sample_costs` folder of shards that do not exist, for schedules at any size."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from diptych.core.files import write_text
from diptych.core.records import FORMAT_VERSION, Manifest, Shard
from diptych.core.tables import SAMPLE_COSTS
from diptych.data.costs import COSTS_NAME, SUMMARY_NAME
from diptych.data.measure import SUMMARY, costs_path, summarize


def write_costs(folder: Path, *, tables: Iterable[tuple[str, pa.Table]]) -> Manifest:
    """Write the costs of a training split.

    Args:
        folder: where to.
        tables: each shard's source and costs.
    """
    shards, rows = [], []
    for number, (source, table) in enumerate(tables):
        path = f"train/{source}-{number:06d}"
        shard = Shard(
            path=f"{path}.tar",
            index_path=f"{path}.parquet",
            split="train",
            source=source,
            num_samples=table.num_rows,
            num_images=table.num_rows,
            num_bytes=0,
            sha256="",
            index_sha256="",
        )
        target = folder / costs_path(shard)
        target.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, target)
        shards.append(shard)
        rows.append(summarize(table, path=shard.path))
    manifest = Manifest(shards=tuple(shards), quarantined={})
    pq.write_table(pa.Table.from_pylist(rows, schema=SUMMARY), folder / SUMMARY_NAME)
    identity = {
        "version": FORMAT_VERSION,
        "manifest_sha256": manifest.sha256,
        "processor_sha256": "",
    }
    write_text(folder / COSTS_NAME, text=json.dumps(identity))
    return manifest


def make_table(num_tokens: np.ndarray, *, num_patches: np.ndarray, aspect: np.ndarray) -> pa.Table:
    """Make a shard's costs of its samples' tokens, patches and the first image's aspect."""
    count = len(num_tokens)
    return pa.table(
        {
            "key": [f"made-up/{sample}" for sample in range(count)],
            "num_tokens": num_tokens.astype(np.int32),
            "num_label_tokens": np.ones(count, np.int32),
            "num_image_tokens": np.zeros(count, np.int32),
            "num_patches": num_patches.astype(np.int32),
            "num_images": (num_patches > 0).astype(np.int32),
            "area_px": num_patches.astype(np.int64) * 256,
            "aspect": np.where(num_patches > 0, aspect, 0).astype(np.float32),
            "status": ["ok"] * count,
        },
        schema=SAMPLE_COSTS,
    )
