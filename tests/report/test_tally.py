"""Counts by source against a count by hand over the very arrays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from diptych.core.records import Buckets
from diptych.data.bucket import bucket_of
from diptych.data.costs import load_costs
from diptych.report.tally import ASPECT_EDGES, LENGTH_EDGES, _count, tally

from .conftest import Finished

BUCKETS = Buckets(areas_px=(6_000, 9_000), aspects=(0.9, 2.0))


def test_every_sample_is_in_one_class(finished: Finished) -> None:
    costs = load_costs(finished.sample_costs, manifest=finished.manifest, split="train")
    (found,) = tally(costs, buckets=BUCKETS)
    assert found.name == "starter"
    # Of 12 rows in turn 8 have one image (60 tokens), 2 two (80), 2 none (40).
    assert {
        tokens: int(found.lengths[np.searchsorted(LENGTH_EDGES, tokens, side="right") - 1])
        for tokens in (40, 60, 80)
    } == {40: 16, 60: 64, 80: 16}
    assert found.lengths.sum() == 96
    assert found.aspects.sum() == 80, "samples with an image"
    numbers = bucket_of(BUCKETS, costs.column("area_px"), costs.column("aspect"))
    assert found.buckets.tolist() == np.bincount(numbers, minlength=10).tolist()


def test_extremes_are_in_the_outer_classes() -> None:
    assert _count(np.array([0.0001, 1e9]), edges=ASPECT_EDGES)[[0, -1]].tolist() == [1, 1]


def test_unusable_samples_are_left_out(finished: Finished) -> None:
    costs = load_costs(finished.sample_costs, manifest=finished.manifest, split="train")
    shard = costs.shard(0)
    usable = shard.usable.copy()
    usable[:10] = False
    costs._kept[0] = replace(shard, usable=usable)
    (found,) = tally(costs, buckets=BUCKETS)
    assert found.lengths.sum() == found.buckets.sum() == 86
