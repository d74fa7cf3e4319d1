"""Costs without shards, for the schedule's tests."""

from __future__ import annotations

import numpy as np

from diptych.core.records import Buckets
from diptych.data.costs import Costs

BUCKETS = Buckets(areas_px=(1_000, 4_000), aspects=(1.0,))


def make_costs(num_samples: int, *, num_shards: int = 4, seed: int = 0, **columns) -> Costs:
    """Draw skewed lengths, images of any bucket and some samples without image."""
    rng = np.random.default_rng(seed)
    has_image = rng.random(num_samples) < 0.8
    num_patches = np.where(has_image, 4 * rng.integers(1, 40, num_samples), 0)
    num_image_tokens = num_patches // 4
    num_tokens = num_image_tokens + np.minimum(rng.lognormal(3.0, 0.7, num_samples), 800) + 8
    cuts = np.sort(rng.integers(0, num_samples + 1, num_shards - 1))
    arrays = {
        "num_tokens": num_tokens.astype(np.int32),
        "num_label_tokens": np.full(num_samples, 3, np.int32),
        "num_image_tokens": num_image_tokens.astype(np.int32),
        "num_patches": num_patches.astype(np.int32),
        "num_images": has_image.astype(np.int32),
        "area_px": np.where(has_image, num_patches * 64, 0).astype(np.int64),
        "aspect": np.where(has_image, rng.uniform(0.3, 3.0, num_samples), 0).astype(np.float32),
        "shard_starts": np.array([0, *cuts, num_samples], np.int64),
    }
    names = {"manifest_sha256": "m" * 64, "processor_sha256": "p" * 64, "split": "train"}
    return Costs(**{**names, **arrays, **columns})
