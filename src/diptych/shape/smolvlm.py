"""SmolVLM's arithmetic: an image is scaled, cut into rows and columns of tiles, and seen whole too.

Its width and height flow in; its tiles, its tokens and the text around them flow out, as Idefics3's
way of splitting has it. What tiles have in common is in `shape/tiles.py`.
"""

from __future__ import annotations

import math

from diptych.core.errors import ConfigError
from diptych.core.records import AnyImageSettings, TileSettings
from diptych.shape.anatomy import Anatomy
from diptych.shape.picture import Picture
from diptych.shape.tiles import Tiles, decoder_widths, one_side, tile_patches, vision_widths
from diptych.shape.widths import Sizes, Widths

_ANATOMY = Anatomy(
    vision="model.vision_model",
    vision_blocks="model.vision_model.encoder.layers",
    connectors=("model.connector",),
    decoder="model.text_model",
    decoder_blocks="model.text_model.layers",
)

VISION = "smolvlm_vision"
"""The vision tower's name in transformers; the family has no other."""

MAX_SIDE_PX = 4096
"""The longer side above which the processor scales an image down, whatever its settings."""


class SmolVLM(Tiles):
    """The family `smolvlm`; see `shape.families.Family` for what each method promises."""

    images = "rows and columns of tiles, and the whole as one more"

    def __init__(self) -> None:
        super().__init__("smolvlm", anatomy=_ANATOMY)

    def tile_tokens(self, sizes: Sizes) -> int:
        """Count the squares of `scale_factor` patches a side, each one token."""
        return tile_patches(sizes["vision"]) // sizes["model"]["scale_factor"] ** 2

    def picture(
        self, *, width_px: int, height_px: int, image: AnyImageSettings, num_images: int = 1
    ) -> Picture:
        """Cut an image, and frame each tile by what says where it stands."""
        assert isinstance(image, TileSettings), "a family of tiles"
        rows, columns = tile_grid((height_px, width_px), image=image)
        num_tiles = rows * columns + 1
        return self.cut(
            (height_px, width_px),
            num_tiles=num_tiles,
            image=image,
            runs=(image.tile_tokens,) * num_tiles,
            frame=_frame(rows, columns, image=image),
        )

    def unused(self, sizes: Sizes) -> tuple[str, ...]:
        """Name no parameter: the loss depends on all of them."""
        return ()

    def widths(self, sizes: Sizes) -> Widths:
        """Read the numbers that decide what the model computes and holds."""
        return Widths(
            decoder=decoder_widths(sizes["text"]),
            vision=vision_widths(sizes["vision"], tile_tokens=self.tile_tokens(sizes)),
        )


def check_sizes(sizes: Sizes) -> None:
    """Refuse sizes, complete ones, that cannot work.

    Raises:
        ConfigError: another vision tower, or patches that are no whole number of tokens.
    """
    found = sizes["vision"]["model_type"]
    if found != VISION:
        raise ConfigError(
            f"vision.model_type is '{found}'",
            allowed=f"A model of 'smolvlm' has a '{VISION}', which is a SigLIP",
            cure="Leave it out, or compose a model of the family 'llava'",
        )
    side_px, patch_px = one_side(sizes["vision"]["image_size"]), sizes["vision"]["patch_size"]
    in_a_row, scale = side_px // one_side(patch_px), sizes["model"]["scale_factor"]
    if scale < 1 or in_a_row < 1 or in_a_row % scale:
        raise ConfigError(
            f"vision.image_size {side_px} has {in_a_row} patches a side, model.scale_factor is "
            f"{scale}",
            allowed="Patches a side are a multiple of scale_factor",
            cure="Change image_size, patch_size or scale_factor",
        )


def tile_grid(size_px: tuple[int, int], *, image: TileSettings) -> tuple[int, int]:
    """Count the rows and columns of tiles that an image is cut into; (0, 0) where it is not cut.

    Args:
        size_px: height and width.
        image: the processor's settings.

    Source: `resize`, `resize_for_vision_encoder` and `split_images` of transformers' SmolVLM image
        processor.
    """
    height, width = size_px
    if image.max_side_px is not None:
        height, width = _scaled(height, width, longest=image.max_side_px)
    side, aspect = image.side_px, width / height
    if width >= height:
        columns = math.ceil(width / side)
        rows = math.ceil(int(columns * side / aspect) / side)
    else:
        rows = math.ceil(height / side)
        columns = math.ceil(int(rows * side * aspect) / side)
    return (0, 0) if rows == columns == 1 else (rows, columns)


def _scaled(height: int, width: int, *, longest: int) -> tuple[int, int]:
    """Scale the longer side to so many px, or to the most there may be; a scaled side is even."""
    aspect = width / height
    if width >= height:
        width, height = longest, int(longest / aspect)
        height += height % 2
    else:
        height, width = longest, int(longest * aspect)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    aspect = width / height
    if width >= height and width > MAX_SIDE_PX:
        width, height = MAX_SIDE_PX, int(MAX_SIDE_PX / aspect)
    elif height > MAX_SIDE_PX:
        height, width = MAX_SIDE_PX, int(MAX_SIDE_PX * aspect)
    return max(height, 1), max(width, 1)


def _frame(rows: int, columns: int, *, image: TileSettings) -> str:
    """Write the text of an image: each tile's place, then the whole image.

    Source: `get_image_prompt_string` of transformers' SmolVLM processor.
    """
    whole = image.before + image.token + image.after
    if not rows:
        return whole
    lines = [
        "".join(
            f"{image.after}<row_{row + 1}_col_{column + 1}>{image.token}"
            for column in range(columns)
        )
        for row in range(rows)
    ]
    return "\n".join([*lines, "", whole])
