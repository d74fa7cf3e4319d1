"""How often an epoch takes each sample of a source, from the schedule's repeats or weights.

The spec and the sources' sizes flow in; a number per source, and from it a number of samples per
shard, flow out. Knows nothing of order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diptych.core.errors import ConfigError, nearest
from diptych.core.records import ScheduleSpec


def repeats_of_sources(
    spec: ScheduleSpec, *, sources: Sequence[str], num_samples: np.ndarray
) -> np.ndarray:
    """Return how often an epoch takes each sample of each source.

    Args:
        spec: `repeats`, or `weights`: shares of an epoch as long as all samples together. A source
            without samples has no share.
        sources: their names.
        num_samples: [number of sources] int64.

    Returns:
        [number of sources] float64.

    Raises:
        ConfigError: a source is unknown, or has no weight.
    """
    for setting, values in (("repeats", spec.repeats), ("weights", spec.weights)):
        _check(setting, values=values, sources=sources)
    if not spec.weights:
        return np.array([spec.repeats.get(source, 1.0) for source in sources])
    unnamed = [
        source
        for source, count in zip(sources, num_samples, strict=True)
        if count and source not in spec.weights
    ]
    if unnamed:
        raise ConfigError(
            f"train.schedule.weights does not name the source {', '.join(unnamed)}",
            allowed="Every source with training samples has a weight; 0 leaves it out",
            cure="Add it",
        )
    weights = np.array([spec.weights.get(source, 0.0) for source in sources])
    shares = np.where(num_samples > 0, weights, 0.0)
    if not shares.sum() > 0:
        raise _no_sample("weights")
    return shares / shares.sum() * num_samples.sum() / np.maximum(num_samples, 1)


def spread(
    repeats: np.ndarray, *, shard_sources: np.ndarray, num_samples: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Say how many samples of each shard an epoch takes.

    Args:
        repeats: [number of sources].
        shard_sources: [num_shards] the source of each shard.
        num_samples: [num_shards] of each shard.

    Returns:
        [num_shards] int64, how often all of them; and [num_shards] int64, how many once more. Over
        a source's shards the latter add up to its repeats' fraction, rounded.

    Raises:
        ConfigError: an epoch would take none.
    """
    whole = np.floor(repeats).astype(np.int64)
    further = np.zeros(len(num_samples), dtype=np.int64)
    for source, fraction in enumerate(repeats - whole):
        mine = shard_sources == source
        reached = np.floor(np.cumsum(num_samples[mine]) * fraction + 0.5).astype(np.int64)
        further[mine] = np.diff(reached, prepend=0)
    if not (whole[shard_sources] * num_samples + further).any():
        raise _no_sample("repeats")
    return whole[shard_sources], further


def _check(setting: str, *, values: dict[str, float], sources: Sequence[str]) -> None:
    for source in values:
        if source not in sources:
            raise ConfigError(
                f"train.schedule.{setting} names '{source}', which is no source",
                cure=nearest(source, allowed=sources),
            )


def _no_sample(setting: str) -> ConfigError:
    return ConfigError(
        f"train.schedule.{setting} leaves no sample in an epoch",
        cure="Give a source that has samples a larger number",
    )
