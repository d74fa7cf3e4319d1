"""Families whose vision tower sees an image as one grid of patches, of whatever size it is.

An image's width and height flow in; its grid, its tokens and their rotary positions flow out, as
Qwen's processor and model make them. What the towers compute is each family's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from diptych.core.errors import ConfigError, DataError
from diptych.core.records import AnyImageSettings, ImageSettings, TokenIds
from diptych.shape.anatomy import Anatomy
from diptych.shape.picture import Picture
from diptych.shape.tiles import check_decoder, one_side
from diptych.shape.widths import Sizes

MAX_ASPECT = 200
"""The longer side over the shorter above which transformers' processor refuses an image."""


class NativeGrid:
    """What such families have in common; see `shape.families.Family` for each method's promise."""

    images = "one grid of patches, of any size"
    sees_ahead: bool = False

    def __init__(self, name: str, *, anatomy: Anatomy) -> None:
        self.name = name
        self.anatomy = anatomy

    def check(self, sizes: Sizes, *, image: AnyImageSettings, tokens: TokenIds) -> None:
        """Refuse sizes, complete ones, that contradict the processor."""
        if not isinstance(image, ImageSettings):
            raise ConfigError(
                f"The processor cuts images into tiles, a model of '{self.name}' takes a grid",
                cure="Use the processor that belongs to the model's family",
            )
        vision = sizes["vision"]
        pairs = (
            ("patch_size", image.patch_px),
            ("spatial_merge_size", image.merge),
            ("temporal_patch_size", image.temporal_patch),
        )
        for name, theirs in pairs:
            ours = one_side(vision[name])
            if ours != theirs:
                raise ConfigError(
                    f"The model's {name} is {ours}, the processor's is {theirs}",
                    cure=f"Set plan.model.sizes.vision.{name}: {theirs}, or fit the processor anew",
                )
        check_decoder(sizes, tokens=tokens)

    def grid(self, *, width_px: int, height_px: int, image: ImageSettings) -> tuple[int, int]:
        """Return (rows, columns) of patches that the processor cuts an image into.

        Source: `smart_resize` of transformers' qwen2_vl image processor.
        """
        if max(width_px, height_px) > MAX_ASPECT * min(width_px, height_px):
            raise DataError(
                f"An image of {width_px} x {height_px} px is too narrow",
                allowed=f"The longer side may be {MAX_ASPECT} times the shorter",
                cure="Crop it, or leave it out",
            )
        factor = image.patch_px * image.merge
        height = round(height_px / factor) * factor
        width = round(width_px / factor) * factor
        if height * width > image.max_area_px:
            beta = math.sqrt((height_px * width_px) / image.max_area_px)
            height = max(factor, math.floor(height_px / beta / factor) * factor)
            width = max(factor, math.floor(width_px / beta / factor) * factor)
        elif height * width < image.min_area_px:
            beta = math.sqrt(image.min_area_px / (height_px * width_px))
            height = math.ceil(height_px * beta / factor) * factor
            width = math.ceil(width_px * beta / factor) * factor
        return height // image.patch_px, width // image.patch_px

    def picture(
        self, *, width_px: int, height_px: int, image: AnyImageSettings, num_images: int = 1
    ) -> Picture:
        """Say what an image becomes; how many others stand beside it changes nothing."""
        assert isinstance(image, ImageSettings), "a family of native grids"
        return _picture(
            self.grid(width_px=width_px, height_px=height_px, image=image), merge=image.merge
        )

    def unit_rows(self, image: AnyImageSettings) -> int:
        """Count the patches of one token."""
        assert isinstance(image, ImageSettings), "a family of native grids"
        return image.merge**2

    def least_filler(self, image: AnyImageSettings) -> int:
        """Count the patches of one token."""
        return self.unit_rows(image)

    def filler(self, num_rows: int, *, image: AnyImageSettings) -> tuple[Picture, ...]:
        """Make one image of so many patches, as flat as can be."""
        assert isinstance(image, ImageSettings), "a family of native grids"
        return (_picture((image.merge, num_rows // image.merge), merge=image.merge),)

    def position_ids(
        self,
        input_ids: np.ndarray,
        *,
        grids: Sequence[tuple[int, int]],
        image: AnyImageSettings,
        image_token_id: int,
    ) -> np.ndarray:
        """Return the rotary positions of one row, [3, S] int64.

        A text token advances the position by one; an image stands at one temporal position and
        advances by its longer side, in tokens.

        Source: `get_rope_index` of transformers' Qwen models.
        """
        assert isinstance(image, ImageSettings), "a family of native grids"
        advance = np.ones(len(input_ids), dtype=np.int64)
        places: list[tuple[int, int, np.ndarray]] = []
        if grids:
            is_image = np.asarray(input_ids) == image_token_id
            advance[is_image] = 0
            slots = np.flatnonzero(is_image)
            end = 0
            for rows, columns in grids:
                offsets, longer = _image_offsets(rows // image.merge, columns // image.merge)
                start, end = end, end + offsets.shape[1]
                assert end <= len(slots), (
                    f"{len(slots)} image tokens are fewer than the grids ask for"
                )
                first, last = int(slots[start]), int(slots[end - 1])
                assert last - first == end - start - 1, "an image's tokens must stand together"
                advance[last] = longer
                places.append((first, last + 1, offsets))
            assert end == len(slots), f"{len(slots)} image tokens, the grids ask for {end}"
        positions = np.empty((3, len(advance)), dtype=np.int64)
        positions[:] = np.cumsum(advance) - advance
        for first, stop, offsets in places:
            positions[1:, first:stop] += offsets
        return positions


def _picture(grid: tuple[int, int], *, merge: int) -> Picture:
    rows, columns = grid
    num_patches = rows * columns
    return Picture(
        grid=grid, num_rows=num_patches, num_patches=num_patches, runs=(num_patches // merge**2,)
    )


@lru_cache(maxsize=4096)
def _image_offsets(rows: int, columns: int) -> tuple[np.ndarray, int]:
    """Return [2, rows * columns] int64 row and column of each token, and the longer side."""
    offsets = np.stack(
        [np.repeat(np.arange(rows), columns), np.tile(np.arange(columns), rows)]
    ).astype(np.int64)
    offsets.setflags(write=False)
    return offsets, max(rows, columns)
