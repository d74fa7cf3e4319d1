"""The model families that are built, found by name.

A family's arithmetic goes in as sizes and image settings and comes out as plain numbers. Weights,
torch and files are unknown here; the torch side of a family is `model/<family>.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from diptych.core.errors import ConfigError, nearest
from diptych.core.records import AnyImageSettings, TokenIds
from diptych.shape.anatomy import Anatomy
from diptych.shape.gemma3 import Gemma3
from diptych.shape.internvl import InternVL
from diptych.shape.llava import Llava
from diptych.shape.llava_onevision import LlavaOnevision
from diptych.shape.picture import Picture
from diptych.shape.qwen2_5_vl import Qwen25VL
from diptych.shape.qwen3_vl import Qwen3VL
from diptych.shape.smolvlm import SmolVLM
from diptych.shape.widths import Sizes, Widths


class Family(Protocol):
    """The arithmetic of one model family. `sizes` has the groups `text`, `vision` and `model`."""

    name: str
    images: str
    """How it cuts images, in a few words."""
    anatomy: Anatomy
    sees_ahead: bool
    """Whether a token of an image sees those of the image that come after it."""

    def check(self, sizes: Sizes, *, image: AnyImageSettings, tokens: TokenIds) -> None:
        """Refuse sizes, complete ones, that contradict the processor.

        Raises:
            ConfigError: the model cuts images otherwise, or the vocabulary is too small.
        """
        ...

    def unused(self, sizes: Sizes) -> tuple[str, ...]:
        """Name by patterns the parameters that no loss depends on."""
        ...

    def picture(
        self, *, width_px: int, height_px: int, image: AnyImageSettings, num_images: int = 1
    ) -> Picture:
        """Say what the processor makes of an image.

        Args:
            width_px: after EXIF rotation.
            height_px: likewise.
            image: the processor's settings.
            num_images: of the whole conversation.

        Raises:
            DataError: the processor would refuse such an image.
        """
        ...

    def unit_rows(self, image: AnyImageSettings) -> int:
        """Count the rows of pixels of the smallest image there can be."""
        ...

    def least_rows(self, sizes: Sizes) -> int:
        """Count the same from the model's sizes."""
        ...

    def least_filler(self, image: AnyImageSettings) -> int:
        """Count the rows of pixels of the smallest filler there can be."""
        ...

    def filler(self, num_rows: int, *, image: AnyImageSettings) -> tuple[Picture, ...]:
        """Make images of so many rows of pixels, a multiple of `unit_rows`, that stand for none."""
        ...

    def position_ids(
        self,
        input_ids: np.ndarray,
        *,
        grids: Sequence[tuple[int, int]],
        image: AnyImageSettings,
        image_token_id: int,
    ) -> np.ndarray:
        """Return the rotary positions of one row.

        Args:
            input_ids: [S] int64, image placeholders expanded.
            grids: each image's `Picture.grid`, in the order in which they stand.
            image: the processor's image settings.
            image_token_id: the placeholder's id.

        Returns:
            [3, S] int64: temporal, row and column positions; three times the same where a family
            has one.
        """
        ...

    def widths(self, sizes: Sizes) -> Widths:
        """Read the numbers that decide what the model computes and holds out of complete sizes."""
        ...


_FAMILIES: dict[str, Family] = {
    known.name: known
    for known in (
        Qwen3VL(),
        InternVL(),
        Llava(),
        Qwen25VL(),
        LlavaOnevision(),
        SmolVLM(),
        Gemma3(),
    )
}


def names() -> tuple[str, ...]:
    """Name the families that are built."""
    return tuple(_FAMILIES)


def family(name: str) -> Family:
    """Return the family of that name.

    Raises:
        ConfigError: there is none.
    """
    if name in _FAMILIES:
        return _FAMILIES[name]
    built = ", ".join(sorted(_FAMILIES))
    raise ConfigError(
        f"There is no model family '{name}'",
        allowed=f"Built: {built}",
        cure=nearest(name, allowed=_FAMILIES),
    )
