"""Compute a frozen vision tower's features of all images, once, before the first step.

In: the model, not spread yet, and the shards. Out: the features' folder, filled; every rank takes
its share of the samples. Knows nothing of batches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import nn

from diptych.core.errors import DataError
from diptych.core.hashing import xxh3_bytes
from diptych.core.records import Manifest
from diptych.data.images.decode import decode
from diptych.data.images.features import Features
from diptych.data.images.patches import Patcher, TilePatcher, load_patcher
from diptych.data.processor import read_processor_info
from diptych.data.shards.reader import ShardReader
from diptych.model.features import compute_features
from diptych.parallel.mesh import World, barrier
from diptych.shape.families import family

_LOG = logging.getLogger(__name__)
_MAX_PATCHES = 16_384
"""How many patches go through the tower at once."""


def fill(
    features: Features,
    *,
    model: nn.Module,
    processor: Path,
    shards: Path | str,
    manifest: Manifest,
    world: World,
) -> None:
    """Compute the features that the folder lacks, and wait for every rank.

    An image that cannot be decoded has none; the loader masks its sample, as it does without
    features.
    """
    info = read_processor_info(processor)
    patcher = load_patcher(processor, image=info.image)
    arithmetic = family(info.family)
    waiting = _Waiting(model=model, features=features, patcher=patcher)
    for name, data in _images(shards, manifest=manifest, world=world):
        if name in waiting.patches or features.has(name):
            continue
        with suppress(DataError):
            pixels = decode(data)
            height_px, width_px = pixels.shape[:2]
            picture = arithmetic.picture(width_px=width_px, height_px=height_px, image=info.image)
            waiting.add(name, patches=patcher.cut(pixels), grid=picture.grid)
    waiting.compute()
    _LOG.info("rank %d computed the features of %d images", world.rank, waiting.num_computed)
    barrier()


def _images(shards: Path | str, *, manifest: Manifest, world: World) -> Iterator[tuple[str, bytes]]:
    """Yield the hash and the bytes of this rank's share of all images."""
    for split in ("train", "heldout"):
        reader = ShardReader(shards, manifest=manifest, split=split)
        for number in range(world.rank, reader.num_samples, world.size):
            for data in reader.read(number).images:
                yield xxh3_bytes(data), data


class _Waiting:
    """Cut images on their way through the tower, many at once."""

    def __init__(
        self, *, model: nn.Module, features: Features, patcher: Patcher | TilePatcher
    ) -> None:
        self.patches: dict[str, np.ndarray] = {}
        self.num_computed = 0
        self._grids: list[tuple[int, int]] = []
        self._model = model
        self._features = features
        self._patcher = patcher

    def add(self, name: str, *, patches: np.ndarray, grid: tuple[int, int]) -> None:
        """Take an image; compute once there are many patches."""
        self.patches[name] = patches
        self._grids.append(grid)
        if sum(len(part) for part in self.patches.values()) >= _MAX_PATCHES:
            self.compute()

    def compute(self) -> None:
        """Send what waits through the tower, and keep the features."""
        if not self.patches:
            return
        device = next(self._model.parameters()).device
        cut = list(self.patches.values())
        found_PW = compute_features(
            self._model,
            patches_PD=self._patcher.normalise(cut).to(device),
            grid_thw_I3=torch.tensor([[1, *grid] for grid in self._grids], device=device),
        )
        parts = torch.split(found_PW, [len(part) for part in cut])
        for name, part in zip(self.patches, parts, strict=True):
            self._features.put(name, features_PW=part)
        self.num_computed += len(parts)
        self.patches, self._grids = {}, []
