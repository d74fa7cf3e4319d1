"""In: a split's sample costs and bucket boundaries. Out: lengths, aspects, buckets by source.

Only counts are kept, so that a corpus of any size is surveyed in the memory of one shard. The
classes of lengths and aspects are fixed and as fine as a histogram needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diptych.core.records import Buckets
from diptych.data.bucket import bucket_of, num_buckets
from diptych.data.costs import Costs, ShardCosts

LENGTH_EDGES = np.unique(np.round(2.0 ** np.arange(0, 21, 0.25)))
"""Tokens at which the classes of lengths begin; the last one holds all that is longer."""
ASPECT_EDGES = 2.0 ** np.arange(-6.125, 6.2, 0.25)
"""Width / height at which the classes of aspects begin; the first and last hold the rest."""


@dataclass(frozen=True)
class SourceTally:
    """The usable samples of one source, counted.

    Attributes:
        name: the source.
        lengths: [len(LENGTH_EDGES)] int64, samples per class of length.
        aspects: [len(ASPECT_EDGES)] int64, samples with images per class of the first one's aspect.
        buckets: [num_buckets] int64, samples per bucket.
    """

    name: str
    lengths: np.ndarray
    aspects: np.ndarray
    buckets: np.ndarray


def tally(costs: Costs, *, buckets: Buckets) -> list[SourceTally]:
    """Count every source's usable samples; a source without any shard is left out."""
    tallies: dict[int, SourceTally] = {}
    for number, source in enumerate(costs.shard_sources.tolist()):
        found = _tally_shard(costs.shard(number), name=costs.sources[source], buckets=buckets)
        tallies[source] = _add(tallies[source], found) if source in tallies else found
    return [tallies[source] for source in sorted(tallies)]


def _tally_shard(shard: ShardCosts, *, name: str, buckets: Buckets) -> SourceTally:
    usable = shard.usable
    numbers = bucket_of(buckets, shard.area_px[usable], shard.aspect[usable])
    return SourceTally(
        name=name,
        lengths=_count(shard.num_tokens[usable], edges=LENGTH_EDGES),
        aspects=_count(shard.aspect[usable & (shard.num_images > 0)], edges=ASPECT_EDGES),
        buckets=np.bincount(numbers, minlength=num_buckets(buckets)),
    )


def _add(one: SourceTally, other: SourceTally) -> SourceTally:
    return SourceTally(
        one.name,
        one.lengths + other.lengths,
        one.aspects + other.aspects,
        one.buckets + other.buckets,
    )


def _count(values: np.ndarray, *, edges: np.ndarray) -> np.ndarray:
    """Count [n] values per class; a value below the first edge is in the first class."""
    classes = np.maximum(np.searchsorted(edges, values, side="right") - 1, 0)
    return np.bincount(classes, minlength=len(edges))
