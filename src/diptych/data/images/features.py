"""Features of a frozen vision tower, kept on disk and read instead of images.

In: a folder, the tower's hash and the width of its features. Out: what `patches.Patcher` is for
images. Who computes features is unknown here; the files are those of `cache.py`, named by
image and by tower, so that another tower finds none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from diptych.data.images.cache import ImageCache

_NO_BOUND = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Features:
    """The features of one tower.

    Attributes:
        folder: where they are kept; other towers' may be there too.
        vision_sha256: the tower's weights, and what cuts its patches.
        width: numbers of each patch.
        dtype: the tower's.
    """

    folder: Path
    vision_sha256: str
    width: int
    dtype: torch.dtype = torch.float32

    def get(self, image_hash: str) -> np.ndarray | None:
        """Return an image's features as bytes, [p, width * bytes of a number] uint8, if kept."""
        found = self._files.get(image_hash)
        return found if found is not None and found.shape[1] == self._row_bytes else None

    def has(self, image_hash: str) -> bool:
        """Tell whether an image's features are kept; only the file's size is looked at."""
        return self._files.has(image_hash)

    def put(self, image_hash: str, *, features_PW: torch.Tensor) -> None:
        """Keep an image's features.

        Raises:
            OSError: The disk does not take them.
        """
        values = features_PW.detach().to(self.dtype).cpu().contiguous()
        self._files.put(image_hash, patches=values.view(torch.uint8).numpy())
        if not self._files.takes_more:
            raise OSError(f"The folder '{self.folder}' takes no more features: is the disk full?")

    def normalise(self, images: Sequence[np.ndarray]) -> torch.Tensor:
        """Join images' features: [P, width] float32, as `get` returned each."""
        joined = torch.from_numpy(np.concatenate(images))
        return joined.view(self.dtype).float()

    def filler(self, num_rows: int) -> torch.Tensor:
        """Make features of an image that is none: [num_rows, width] float32 zeros."""
        return torch.zeros((num_rows, self.width))

    @property
    def _row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @cached_property
    def _files(self) -> ImageCache:
        return ImageCache(self.folder, max_bytes=_NO_BOUND, maker_sha256=self.vision_sha256)
