"""Boundaries by quantiles, and the arithmetic from size to bucket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from diptych.core.records import Buckets
from diptych.data.bucket import (
    BucketParams,
    bucket,
    bucket_name,
    bucket_of,
    measure_areas,
    num_buckets,
)


def _table(sizes: list[list[tuple[int, int]]], *, split: list[str] | None = None) -> pa.Table:
    lists = pa.list_(pa.int32())
    return pa.table(
        {
            "split": pa.array(split or ["train"] * len(sizes), pa.string()),
            "widths_px": pa.array([[w for w, _ in images] for images in sizes], lists),
            "heights_px": pa.array([[h for _, h in images] for images in sizes], lists),
        }
    )


@pytest.fixture
def cut(tmp_path: Path) -> Callable[..., Buckets]:
    """Cut a table into buckets; it is written as an index of two parts."""

    def run(table: pa.Table, params: BucketParams) -> Buckets:
        half = table.num_rows // 2
        for number, part in enumerate((table[:half], table[half:])):
            pq.write_table(part, tmp_path / f"{number}.parquet")
        return bucket(tmp_path, params)

    return run


def test_areas_are_summed_over_a_samples_images() -> None:
    table = _table([[(3, 4), (5, 6)], [], [(70_000, 50_000)], [(1, 1)]])
    np.testing.assert_array_equal(measure_areas(table), [42, 0, 3_500_000_000, 1])
    np.testing.assert_array_equal(measure_areas(table.slice(1, 2)), [0, 3_500_000_000])
    assert len(measure_areas(_table([]))) == 0


def test_cuts_part_the_training_samples_evenly(cut) -> None:
    sizes = [[(width, 10)] for width in range(1, 101)]
    buckets = cut(_table(sizes), BucketParams(num_areas=4, aspects=()))
    counts = np.bincount(
        [bucket_of(buckets, width * 10, width / 10) for width in range(1, 101)], minlength=5
    )
    assert counts[0] == 0
    assert all(24 <= count <= 26 for count in counts[1:])


def test_heldout_and_text_do_not_move_the_cuts(cut) -> None:
    sizes = [[(10, 10)], [(20, 10)], [(30, 10)], [(40, 10)]]
    params = BucketParams(num_areas=2)
    alone = cut(_table(sizes), params)
    more = [*sizes, [], [], [], [(900, 900)], [(900, 900)]]
    split = ["train"] * 7 + ["heldout"] * 2
    assert cut(_table(more, split=split), params) == alone
    assert len(alone.areas_px) == 1
    assert 100 < alone.areas_px[0] <= 400


def test_equal_cuts_are_one_and_no_class_is_empty(cut) -> None:
    sizes = [[(10, 10)]] * 90 + [[(20, 10)]] * 10
    assert cut(_table(sizes), BucketParams(num_areas=8)).areas_px == ()
    sizes = [[(10, 10)]] * 40 + [[(20, 10)]] * 60
    assert cut(_table(sizes), BucketParams(num_areas=8)).areas_px == (200,)
    assert cut(_table([[], []]), BucketParams()).areas_px == ()


def _by_hand(areas: list[int], aspects: list[float], area_px: int, aspect: float) -> int:
    if area_px == 0:
        return 0
    area_class = sum(area_px >= cut for cut in areas)
    aspect_class = sum(aspect >= cut for cut in aspects)
    return 1 + area_class * (len(aspects) + 1) + aspect_class


@given(
    st.lists(st.integers(1, 50), max_size=4, unique=True).map(sorted),
    st.lists(st.sampled_from([0.25, 0.5, 0.75, 1.5, 3.0]), max_size=3, unique=True).map(sorted),
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from([0.1, 0.5, 1, 1.5, 9])), min_size=1),
)
def test_the_bucket_is_what_the_records_docstring_says(areas, aspects, samples) -> None:
    buckets = Buckets(areas_px=tuple(areas), aspects=tuple(aspects))
    expected = [_by_hand(areas, aspects, *sample) for sample in samples]
    found = bucket_of(
        buckets,
        np.array([area for area, _ in samples]),
        np.array([aspect for _, aspect in samples], dtype=np.float32),
    )
    np.testing.assert_array_equal(found, expected)
    assert [bucket_of(buckets, *sample) for sample in samples] == expected
    assert max(expected) < num_buckets(buckets)


def test_every_bucket_has_a_name_of_its_own() -> None:
    buckets = Buckets(areas_px=(1000, 2500), aspects=(0.75, 1.5))
    names = [bucket_name(buckets, number) for number in range(num_buckets(buckets))]
    assert len(set(names)) == 10
    assert names[0] == "text only"
    assert names[1] == "area under 1,000 px, aspect under 0.75"
    assert names[5] == "area 1,000 to 2,500 px, aspect 0.75 to 1.5"
    assert names[9] == "area from 2,500 px, aspect from 1.5"
    assert bucket_name(Buckets(areas_px=(), aspects=()), 1) == "area any, aspect any"
    with pytest.raises(AssertionError, match="no bucket 10"):
        bucket_name(buckets, 10)


@pytest.mark.parametrize("aspects", [[1.5, 0.75], [1.0, 1.0], [0.0, 1.0], [-1.0]])
def test_aspects_ascend(aspects: list[float]) -> None:
    with pytest.raises(ValidationError, match="ascend"):
        BucketParams(aspects=aspects)
