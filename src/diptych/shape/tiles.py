"""Families whose vision tower sees square tiles of one size, and whose tokens have one position.

An image's width and height flow in; its tiles and tokens flow out. The base class makes one tile of
every image; a family that cuts images overrides `picture`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from diptych.core.errors import ConfigError
from diptych.core.records import AnyImageSettings, TileSettings, TokenIds
from diptych.shape.anatomy import Anatomy
from diptych.shape.picture import Picture
from diptych.shape.widths import DecoderWidths, Sizes, VisionWidths

CLASS_TOKENS = {"clip_vision_model": 1, "internvl_vision": 1}
"""Tokens of a tile beside its patches, by transformers' name of the tower; 0 for others."""


class Tiles:
    """What such families have in common; see `shape.families.Family` for each method's promise."""

    images = "one square tile"
    sees_ahead: bool = False

    def __init__(self, name: str, *, anatomy: Anatomy) -> None:
        self.name = name
        self.anatomy = anatomy

    def tile_tokens(self, sizes: Sizes) -> int:
        """Count the tokens that the decoder sees of a tile; the base class: one a patch."""
        return tile_patches(sizes["vision"])

    def picture(
        self, *, width_px: int, height_px: int, image: AnyImageSettings, num_images: int = 1
    ) -> Picture:
        """Make one tile of an image."""
        return self.cut((height_px, width_px), num_tiles=1, image=image)

    def cut(
        self,
        grid: tuple[int, int],
        *,
        num_tiles: int,
        image: AnyImageSettings,
        runs: tuple[int, ...] | None = None,
        frame: str | None = None,
    ) -> Picture:
        """Describe an image of so many tiles, whose tokens stand together unless told otherwise."""
        assert isinstance(image, TileSettings), "a family of tiles"
        if frame is None:
            frame = image.before + image.token + image.after
        return Picture(
            grid=grid,
            num_rows=num_tiles,
            num_patches=num_tiles * (image.side_px // image.patch_px) ** 2,
            runs=runs or (num_tiles * image.tile_tokens,),
            frame=None if frame == image.placeholder else frame,
        )

    def unit_rows(self, image: AnyImageSettings) -> int:
        """Count one tile."""
        return 1

    def least_rows(self, sizes: Sizes) -> int:
        """Count one tile."""
        return 1

    def least_filler(self, image: AnyImageSettings) -> int:
        """Count one tile."""
        return 1

    def filler(self, num_rows: int, *, image: AnyImageSettings) -> tuple[Picture, ...]:
        """Make as many images of one tile."""
        assert isinstance(image, TileSettings), "a family of tiles"
        return (self.cut((image.side_px, image.side_px), num_tiles=1, image=image),) * num_rows

    def position_ids(
        self,
        input_ids: np.ndarray,
        *,
        grids: Sequence[tuple[int, int]],
        image: AnyImageSettings,
        image_token_id: int,
    ) -> np.ndarray:
        """Count tokens from 0, three times the same."""
        return np.broadcast_to(np.arange(len(input_ids), dtype=np.int64), (3, len(input_ids)))

    def check(self, sizes: Sizes, *, image: AnyImageSettings, tokens: TokenIds) -> None:
        """Refuse sizes that contradict the processor."""
        if not isinstance(image, TileSettings):
            raise ConfigError(
                f"The processor cuts images into a grid, a model of '{self.name}' takes tiles",
                cure="Use the processor that belongs to the model's family",
            )
        vision = sizes["vision"]
        side_px, patch_px = one_side(vision["image_size"]), one_side(vision["patch_size"])
        # Processors that name no patches are known by how many a tile has.
        has_as_many = side_px // patch_px == image.side_px // image.patch_px
        pairs = (
            ("image_size", side_px, image.side_px, side_px == image.side_px),
            ("patch_size", patch_px, image.patch_px, has_as_many),
        )
        for name, ours, theirs, agrees in pairs:
            if not agrees:
                raise ConfigError(
                    f"The model's {name} is {ours}, the processor's is {theirs}",
                    cure=f"Set plan.model.sizes.vision.{name}: {theirs}, or use the processor "
                    "that belongs to the weights",
                )
        wanted = self.tile_tokens(sizes)
        if wanted != image.tile_tokens:
            raise ConfigError(
                f"The model makes {wanted} tokens of a tile, the processor {image.tile_tokens}",
                cure="Use the processor that belongs to the model",
            )
        check_decoder(sizes, tokens=tokens)


def check_decoder(sizes: Sizes, *, tokens: TokenIds) -> None:
    """Refuse a vocabulary that lacks some of the tokenizer's tokens, and heads that cannot share.

    Raises:
        ConfigError: the vocabulary is too small, or key heads do not divide query heads.
    """
    heads = sizes["text"].get("num_attention_heads")
    key_heads = sizes["text"].get("num_key_value_heads")
    if heads and key_heads and heads % key_heads:
        raise ConfigError(
            f"The decoder's num_attention_heads is {heads}, its num_key_value_heads {key_heads}",
            allowed="As many query heads for each key head",
            cure="Set plan.model.sizes.text.num_key_value_heads to a divisor of the other",
        )
    num_tokens = tokens.num_embeddings
    if num_tokens > sizes["text"]["vocab_size"]:
        raise ConfigError(
            f"The tokenizer has {num_tokens} tokens, the model's vocab_size is "
            f"{sizes['text']['vocab_size']}",
            cure=f"Set plan.model.sizes.text.vocab_size to {num_tokens} or more, "
            "or use a smaller tokenizer",
        )


def one_side(size: Any) -> int:
    """Read a side in px out of a number or of a pair of equal ones.

    Raises:
        ConfigError: height and width differ, or are none.
    """
    sides: list[int] = [size] if isinstance(size, int) else list(size)
    if len(set(sides)) != 1:
        raise ConfigError(
            f"The vision tower's sizes are {sides}", allowed="Square tiles and patches"
        )
    if sides[0] < 1:
        raise ConfigError(
            f"The vision tower's sizes have a side of {sides[0]}",
            allowed="1 px and more",
            cure="Correct image_size and patch_size",
        )
    return sides[0]


def tile_patches(vision: dict[str, Any] | Any) -> int:
    """Count the patches of a tile; what is left over at the edge is in none."""
    return (one_side(vision["image_size"]) // one_side(vision["patch_size"])) ** 2


def decoder_widths(text: dict[str, Any] | Any) -> DecoderWidths:
    """Read a decoder's numbers out of sizes that are named as in most of transformers' configs."""
    heads = text["num_attention_heads"]
    head_width = text.get("head_dim") or text["hidden_size"] // heads
    return DecoderWidths(
        num_layers=text["num_hidden_layers"],
        width=text["hidden_size"],
        inner=text["intermediate_size"],
        queries=heads * head_width,
        keys=(text.get("num_key_value_heads") or heads) * head_width,
        vocab_size=text["vocab_size"],
    )


def vision_widths(vision: dict[str, Any] | Any, *, tile_tokens: int) -> VisionWidths:
    """Read a tower's numbers; the connector makes so many tokens of a tile."""
    num_patches = tile_patches(vision)
    assert num_patches % tile_tokens == 0, "every token is made of as many patches"
    return VisionWidths(
        num_layers=vision["num_hidden_layers"],
        width=vision["hidden_size"],
        inner=vision["intermediate_size"],
        patch_numbers=vision["num_channels"] * math.prod((one_side(vision["patch_size"]),) * 2),
        merged=num_patches // tile_tokens,
        tile_patches=num_patches,
        extra=CLASS_TOKENS.get(vision["model_type"], 0),
    )
