"""Costs without shards, for the schedule's tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa

from diptych.core.records import Buckets
from diptych.core.tables import SAMPLE_COSTS
from diptych.data.costs import Costs, ShardCosts
from diptych.data.measure import SUMMARY, summarize

BUCKETS = Buckets(areas_px=(1_000, 4_000), aspects=(1.0,))


def make_costs(
    num_samples: int,
    *,
    num_shards: int = 4,
    seed: int = 0,
    sources: Sequence[str] = ("toy",),
    shard_sources: Sequence[int] | None = None,
    names: dict[str, str] | None = None,
    **columns,
) -> Costs:
    """Draw skewed lengths, images of any bucket and some samples without image.

    Args:
        num_samples: of all shards together.
        num_shards: cut at random; some may be empty.
        seed: of what is drawn.
        sources: their names.
        shard_sources: the source of each shard; None takes them in turns.
        names: other hashes.
        columns: of SAMPLE_COSTS, instead of what is drawn; `shard_starts` cuts the shards.
    """
    rng = np.random.default_rng(seed)
    has_image = rng.random(num_samples) < 0.8
    num_patches = np.where(has_image, 4 * rng.integers(1, 40, num_samples), 0)
    num_image_tokens = num_patches // 4
    num_tokens = num_image_tokens + np.minimum(rng.lognormal(3.0, 0.7, num_samples), 800) + 8
    cuts = np.sort(rng.integers(0, num_samples + 1, num_shards - 1))
    drawn = {
        "key": [f"toy/{number}" for number in range(num_samples)],
        "num_tokens": num_tokens.astype(np.int32),
        "num_label_tokens": np.full(num_samples, 3, np.int32),
        "num_image_tokens": num_image_tokens.astype(np.int32),
        "num_patches": num_patches.astype(np.int32),
        "num_images": has_image.astype(np.int32),
        "area_px": np.where(has_image, num_patches * 64, 0).astype(np.int64),
        "aspect": np.where(has_image, rng.uniform(0.3, 3.0, num_samples), 0).astype(np.float32),
        "status": ["ok"] * num_samples,
    }
    starts = np.asarray(columns.pop("shard_starts", [0, *cuts, num_samples]))
    table = pa.table({**drawn, **columns}, schema=SAMPLE_COSTS)
    tables = [table.slice(first, end - first) for first, end in pairwise(starts.tolist())]
    rows = [summarize(shard, path=f"{number}.tar") for number, shard in enumerate(tables)]
    summary = pa.Table.from_pylist(rows, schema=SUMMARY)

    def read(number: int) -> ShardCosts:
        shard = tables[number].drop_columns(["key"])
        arrays = {name: shard[name].to_numpy() for name in shard.column_names}
        return ShardCosts(usable=arrays.pop("status") == "ok", **arrays)

    if shard_sources is None:
        shard_sources = [number % len(sources) for number in range(len(tables))]
    hashes = {"manifest_sha256": "m" * 64, "processor_sha256": "p" * 64, "split": "train"}
    return Costs(
        **{**hashes, **(names or {})},
        sources=tuple(sources),
        shard_sources=np.asarray(shard_sources, np.int64),
        summary={name: summary[name].to_numpy() for name in SUMMARY.names if name != "path"},
        read=read,
    )
