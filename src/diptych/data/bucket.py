"""Choose the boundaries of resolution buckets; which bucket a sample is in is arithmetic.

In: the folder of `sample_index`. Out: `buckets`, cut at quantiles of the training samples' total
image area and at fixed aspects. Knows nothing of batches: the schedule uses the boundaries.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, field_validator

from diptych.core.records import Buckets, Section
from diptych.core.tables import read_parts


class BucketParams(Section):
    """Into how many classes of area the samples are cut, and at which aspects (width / height)."""

    num_areas: int = Field(default=4, ge=1, le=64)
    aspects: tuple[float, ...] = (0.75, 1.5, 3.0)

    @field_validator("aspects")
    @classmethod
    def _ascends(cls, aspects: tuple[float, ...]) -> tuple[float, ...]:
        if any(aspect <= 0 for aspect in aspects) or any(a >= b for a, b in pairwise(aspects)):
            raise ValueError("aspects are positive and ascend, such as [0.75, 1.5, 3.0]")
        return aspects


def bucket(sample_index: Path, params: BucketParams) -> Buckets:
    """Cut the training samples with images into classes of equal count by area.

    Args:
        sample_index: The folder of `core.tables.SAMPLE_INDEX`.
        params: How many classes, and the aspects.

    Returns:
        The boundaries. There are fewer than asked for where many samples have the same area.
    """
    columns = ["split", "widths_px", "heights_px"]
    areas_px = np.concatenate(
        [
            np.empty(0, dtype=np.int64),
            *(
                measure_areas(part.filter(pc.field("split") == "train"))
                for part in read_parts(sample_index, columns=columns)
            ),
        ]
    )
    areas_px = areas_px[areas_px > 0]
    if not len(areas_px):
        return Buckets(areas_px=(), aspects=params.aspects)
    at = np.arange(1, params.num_areas) / params.num_areas
    cuts = np.quantile(areas_px, at, method="higher").astype(np.int64)
    # A cut at the smallest area would leave nothing below it.
    cuts = np.unique(cuts[cuts > areas_px.min()])
    return Buckets(areas_px=tuple(int(cut) for cut in cuts), aspects=params.aspects)


def measure_areas(sample_index: pa.Table) -> np.ndarray:
    """Sum the images' areas of each sample.

    Args:
        sample_index: Any table with `widths_px` and `heights_px`.

    Returns:
        [number of rows] int64, in px; 0 for text only.
    """
    widths = sample_index["widths_px"].combine_chunks()
    heights = sample_index["heights_px"].combine_chunks()
    counts = widths.value_lengths().to_numpy()
    areas = widths.flatten().to_numpy().astype(np.int64) * heights.flatten().to_numpy()
    totals = np.zeros(len(counts), dtype=np.int64)
    np.add.at(totals, np.repeat(np.arange(len(counts)), counts), areas)
    return totals


@overload
def bucket_of(buckets: Buckets, area_px: int, aspect: float) -> int: ...
@overload
def bucket_of(buckets: Buckets, area_px: np.ndarray, aspect: np.ndarray) -> np.ndarray: ...
def bucket_of(
    buckets: Buckets, area_px: int | np.ndarray, aspect: float | np.ndarray
) -> int | np.ndarray:
    """Return the bucket of a sample, or of many.

    Args:
        buckets: The boundaries; a value at a boundary is in the class above it.
        area_px: Area of all images of a sample together; 0 without image.
        aspect: Width / height of its first image.

    Returns:
        0 for text only, else as `Buckets` says; int64 of the arguments' shape.
    """
    area_class = np.searchsorted(np.asarray(buckets.areas_px), area_px, side="right")
    aspect_class = np.searchsorted(np.asarray(buckets.aspects), aspect, side="right")
    number = 1 + area_class * (len(buckets.aspects) + 1) + aspect_class
    found = np.where(np.asarray(area_px) == 0, 0, number)
    return int(found) if found.ndim == 0 else found


def num_buckets(buckets: Buckets) -> int:
    """Count the buckets, the one for text only included."""
    return 1 + (len(buckets.areas_px) + 1) * (len(buckets.aspects) + 1)


def bucket_name(buckets: Buckets, bucket: int) -> str:
    """Describe a bucket for a person, as 'area under 1,024 px, aspect 0.75 to 1.5'.

    Args:
        buckets: The boundaries.
        bucket: Its number, from 0 to `num_buckets` - 1.
    """
    assert 0 <= bucket < num_buckets(buckets), f"there is no bucket {bucket}"
    if bucket == 0:
        return "text only"
    area_class, aspect_class = divmod(bucket - 1, len(buckets.aspects) + 1)
    area = _range([f"{cut:,}" for cut in buckets.areas_px], place=area_class)
    aspect = _range([f"{cut:g}" for cut in buckets.aspects], place=aspect_class)
    return f"area {area}{'' if area == 'any' else ' px'}, aspect {aspect}"


def _range(cuts: list[str], *, place: int) -> str:
    if not cuts:
        return "any"
    if place == 0:
        return f"under {cuts[0]}"
    if place == len(cuts):
        return f"from {cuts[-1]}"
    return f"{cuts[place - 1]} to {cuts[place]}"
