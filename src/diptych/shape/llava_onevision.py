"""LLaVA-OneVision's arithmetic: a small copy of an image, and tiles of it as large as it is.

An image's width and height flow in; its tiles, and its tokens without those of the padding, flow
out, as transformers' processor and model count them. Of several images in a conversation there are
small copies alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from diptych.core.errors import ConfigError, DataError
from diptych.core.records import AnyImageSettings, TileSettings, TokenIds
from diptych.shape.anatomy import Anatomy
from diptych.shape.llava import ANATOMY as LLAVA
from diptych.shape.llava import unused_vision
from diptych.shape.picture import Picture
from diptych.shape.tiles import (
    CLASS_TOKENS,
    Tiles,
    decoder_widths,
    one_side,
    tile_patches,
    vision_widths,
)
from diptych.shape.widths import Sizes, Widths

ANATOMY = Anatomy(
    vision=LLAVA.vision,
    vision_blocks=LLAVA.vision_blocks,
    connectors=(*LLAVA.connectors, "model.image_newline"),
    decoder=LLAVA.decoder,
    decoder_blocks=LLAVA.decoder_blocks,
)

UNCUT = (0, 0)
"""The grid of an image of which there is a small copy alone: its size does not matter."""

_MAX_SIDE_TILES = 6
_MOST_OVER = 1.1
"""How many times longer than allowed the side of a grid of tokens may be before it shrinks."""


class LlavaOnevision(Tiles):
    """The family `llava_onevision`; see `shape.families.Family` for what each method promises."""

    images = "a small copy, and tiles of it where it stands alone"

    def __init__(self) -> None:
        super().__init__("llava_onevision", anatomy=ANATOMY)

    def picture(
        self, *, width_px: int, height_px: int, image: AnyImageSettings, num_images: int = 1
    ) -> Picture:
        """Fit an image that is alone into one of the resolutions, and count tokens and newlines."""
        assert isinstance(image, TileSettings), "a family of tiles"
        if num_images > 1:
            return self._copy(image)
        height, width = best_resolution(width_px, height_px, resolutions=image.resolutions)
        tile_rows, tile_columns = height // image.side_px, width // image.side_px
        rows, columns = unpadded(
            width_px,
            height_px,
            rows=tile_rows * (image.side_px // image.patch_px),
            columns=tile_columns * (image.side_px // image.patch_px),
        )
        rows, columns = _shrunk(rows, columns, most=image.max_tiles * image.tile_tokens)
        if (rows, columns) == (0, 0):
            raise DataError(
                f"An image of {width_px} x {height_px} px is too narrow",
                allowed="Each side keeps a token when its grid shrinks",
                cure="Crop it, or leave it out",
            )
        return self.cut(
            (height_px, width_px),
            num_tiles=1 + tile_rows * tile_columns,
            image=image,
            runs=(image.tile_tokens + rows * (columns + 1),),
        )

    def least_filler(self, image: AnyImageSettings) -> int:
        """Count two copies: one would be an image that is alone, which is cut."""
        return 2

    def filler(self, num_rows: int, *, image: AnyImageSettings) -> tuple[Picture, ...]:
        """Make as many images of which there are copies alone."""
        assert isinstance(image, TileSettings), "a family of tiles"
        return (self._copy(image),) * num_rows

    def unused(self, sizes: Sizes) -> tuple[str, ...]:
        """Name the layers behind the one whose output the connector reads."""
        return unused_vision(sizes)

    def widths(self, sizes: Sizes) -> Widths:
        """Read the numbers that decide what the model computes and holds."""
        vision = sizes["vision"]
        return Widths(
            decoder=decoder_widths(sizes["text"]),
            vision=vision_widths(vision, tile_tokens=tile_patches(vision)),
        )

    def check(self, sizes: Sizes, *, image: AnyImageSettings, tokens: TokenIds) -> None:
        """Refuse sizes that contradict the processor."""
        super().check(sizes, image=image, tokens=tokens)
        assert isinstance(image, TileSettings), "checked above"
        model = sizes["model"]
        resolutions = tuple(tuple(pair) for pair in model["image_grid_pinpoints"])
        if resolutions != image.resolutions:
            raise ConfigError(
                f"The model's image_grid_pinpoints are {_listed(resolutions)}, "
                f"the processor's {_listed(image.resolutions)}",
                cure="Set plan.model.sizes.model.image_grid_pinpoints to the processor's",
            )
        if max_tiles(model["vision_aspect_ratio"]) != image.max_tiles:
            raise ConfigError(
                f"The model's vision_aspect_ratio is {model['vision_aspect_ratio']}, "
                f"the processor's anyres_max_{image.max_tiles}",
                cure="Set plan.model.sizes.model.vision_aspect_ratio to the processor's",
            )

    def _copy(self, image: TileSettings) -> Picture:
        """Describe an image of which there is a small copy alone, and the newline behind it."""
        return self.cut(UNCUT, num_tiles=1, image=image, runs=(image.tile_tokens + 1,))


def check_sizes(sizes: Sizes) -> None:
    """Refuse sizes with which transformers' model cannot run.

    Raises:
        ConfigError: the connector does not read exactly a tile's patches, or a resolution is not
            one of whole tiles.
    """
    vision, model = sizes["vision"], sizes["model"]
    strategy = model["vision_feature_select_strategy"]
    if (strategy == "default") != (CLASS_TOKENS.get(vision["model_type"], 0) == 1):
        raise ConfigError(
            f"plan.model.sizes.model.vision_feature_select_strategy is {strategy} for a tower "
            f"'{vision['model_type']}'",
            allowed="default where the tower has a class token, which it drops, else full",
            cure="Set the other",
        )
    side_px = one_side(vision["image_size"])
    wrong = [pair for pair in model["image_grid_pinpoints"] if any(px % side_px for px in pair)]
    if wrong or not model["image_grid_pinpoints"]:
        raise ConfigError(
            f"plan.model.sizes.model.image_grid_pinpoints has {wrong or 'nothing'}",
            allowed=f"(height, width) of whole tiles, multiples of {side_px} px",
            cure="Leave it out: up to six tiles each way",
        )
    max_tiles(model["vision_aspect_ratio"])


def max_tiles(vision_aspect_ratio: str) -> int:
    """Read how many tiles' tokens an image keeps out of 'anyres_max_9'.

    Raises:
        ConfigError: it ends in no number.
    """
    number = vision_aspect_ratio.removeprefix("anyres_max_")
    if not number.isdecimal() or int(number) == 0:
        raise ConfigError(
            f"The vision_aspect_ratio is '{vision_aspect_ratio}'",
            allowed="anyres_max_ and a number of tiles, such as anyres_max_9",
            cure="Correct it in plan.model.sizes.model, or in the processor",
        )
    return int(number)


def default_resolutions(side_px: int) -> tuple[tuple[int, int], ...]:
    """List (height, width) in px of up to six tiles each way, as released models have them."""
    sides = range(side_px, (_MAX_SIDE_TILES + 1) * side_px, side_px)
    return tuple((height, width) for height in sides for width in sides)


def best_resolution(
    width_px: int, height_px: int, *, resolutions: tuple[tuple[int, int], ...]
) -> tuple[int, int]:
    """Return the (height, width) in which most of an image is kept and, of several, least wasted.

    Source: `select_best_resolution` of transformers' image_processing_utils.
    """
    return _best_resolution(width_px, height_px, resolutions)


@lru_cache(maxsize=4096)
def _best_resolution(
    width_px: int, height_px: int, resolutions: tuple[tuple[int, int], ...]
) -> tuple[int, int]:
    best, most, least_wasted = resolutions[0], 0, math.inf
    for height, width in resolutions:
        scale = min(width / width_px, height / height_px)
        kept = min(int(width_px * scale) * int(height_px * scale), width_px * height_px)
        wasted = width * height - kept
        if kept > most or (kept == most and wasted < least_wasted):
            best, most, least_wasted = (height, width), kept, wasted
    return best


def unpadded(width_px: int, height_px: int, *, rows: int, columns: int) -> tuple[int, int]:
    """Return (rows, columns) of a grid of tokens without the padding of the image in it.

    Source: `unpad_image` of transformers' LLaVA-OneVision model, and its processor.
    """
    if width_px / height_px > columns / rows:
        kept = int(round(height_px * (columns / width_px), 7))
        return rows - (rows - kept) // 2 * 2, columns
    kept = int(round(width_px * (rows / height_px), 7))
    return rows, columns - (columns - kept) // 2 * 2


def _shrunk(rows: int, columns: int, *, most: int) -> tuple[int, int]:
    """Shrink a grid of far more than `most` tokens; (0, 0) where nothing of a side would be left.

    Source: `pack_image_features` of transformers' LLaVA-OneVision model, and its processor.
    """
    ratio = math.sqrt(rows * columns / most)
    if ratio <= _MOST_OVER:
        return rows, columns
    shrunk = int(rows // ratio), int(columns // ratio)
    return shrunk if all(shrunk) else (0, 0)


def _listed(resolutions: Sequence[Sequence[int]]) -> str:
    """Name a few of many."""
    few = ", ".join(f"{height} x {width}" for height, width in resolutions[:3])
    return f"{len(resolutions)}: {few}" + (", ..." if len(resolutions) > 3 else "")
