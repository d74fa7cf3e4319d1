"""InternVL's arithmetic: an image is cut into tiles after its aspect, and a small copy joins them.

An image's width and height flow in; how many tiles it has flows out, as transformers' processor
cuts it. A tile's patches become a quarter as many tokens, between two tokens of their own.
"""

from __future__ import annotations

from functools import lru_cache

from diptych.core.errors import ConfigError
from diptych.core.records import AnyImageSettings, TileSettings
from diptych.shape.anatomy import Anatomy
from diptych.shape.picture import Picture
from diptych.shape.tiles import Tiles, decoder_widths, one_side, tile_patches, vision_widths
from diptych.shape.widths import Sizes, Widths

MERGED_SIDE = 2
"""Patches a side of what becomes one token, in every released model: `downsample_ratio` 0.5."""

ANATOMY = Anatomy(
    vision="model.vision_tower",
    vision_blocks="model.vision_tower.encoder.layer",
    connectors=("model.multi_modal_projector",),
    decoder="model.language_model",
    decoder_blocks="model.language_model.layers",
)


class InternVL(Tiles):
    """The family `internvl`; see `shape.families.Family` for what each method promises."""

    images = "tiles after its aspect, and a small copy of it"

    def __init__(self) -> None:
        super().__init__("internvl", anatomy=ANATOMY)

    def tile_tokens(self, sizes: Sizes) -> int:
        """Count a quarter of a tile's patches."""
        return tile_patches(sizes["vision"]) // MERGED_SIDE**2

    def picture(
        self, *, width_px: int, height_px: int, image: AnyImageSettings, num_images: int = 1
    ) -> Picture:
        """Cut an image into tiles; how many others stand beside it changes nothing."""
        assert isinstance(image, TileSettings), "a family of tiles"
        columns, rows = arrange(
            width_px,
            height_px,
            side_px=image.side_px,
            least=image.min_tiles,
            most=image.max_tiles,
        )
        num_tiles = columns * rows
        return self.cut(
            (height_px, width_px),
            num_tiles=num_tiles + int(image.thumbnail and num_tiles > 1),
            image=image,
        )

    def unused(self, sizes: Sizes) -> tuple[str, ...]:
        """Name the layers behind the one that the connector reads, and the token of masks."""
        chosen = sizes["model"]["vision_feature_layer"]
        mask = f"{ANATOMY.vision}.embeddings.mask_token"
        if chosen == -1:
            return (mask,)
        num_layers = sizes["vision"]["num_hidden_layers"]
        last = chosen if chosen >= 0 else num_layers + 1 + chosen
        unread = tuple(f"{ANATOMY.vision_blocks}.{index}.*" for index in range(last, num_layers))
        return (mask, *unread, f"{ANATOMY.vision}.layernorm.*")

    def widths(self, sizes: Sizes) -> Widths:
        """Read the numbers that decide what the model computes and holds."""
        return Widths(
            decoder=decoder_widths(sizes["text"]),
            vision=vision_widths(sizes["vision"], tile_tokens=self.tile_tokens(sizes)),
        )


def check_sizes(sizes: Sizes) -> None:
    """Refuse sizes with which transformers' model cannot run.

    Raises:
        ConfigError: tiles have an odd number of patches a side, or the connector reads them
            otherwise than every released model does.
    """
    vision, model = sizes["vision"], sizes["model"]
    num_layers, layer = vision["num_hidden_layers"], model["vision_feature_layer"]
    if vision["model_type"] != "internvl_vision":
        raise ConfigError(
            f"plan.model.sizes.vision.model_type is '{vision['model_type']}'",
            allowed="internvl_vision; the family llava takes other towers",
            cure="Leave it out, or set plan.model.family: llava",
        )
    for name, allowed in (
        ("downsample_ratio", 1 / MERGED_SIDE),
        ("vision_feature_select_strategy", "default"),
    ):
        if model[name] != allowed:
            raise ConfigError(
                f"plan.model.sizes.model.{name} is {model[name]}",
                allowed=f"{allowed}: transformers' processor counts tokens for no other",
                cure="Leave it out",
            )
    if not isinstance(layer, int) or not -num_layers <= layer <= num_layers:
        raise ConfigError(
            f"plan.model.sizes.model.vision_feature_layer is {layer}",
            allowed=f"One of {num_layers} layers: {-num_layers} to {num_layers}",
            cure="Leave it out, which is the last",
        )
    image_px, patch_px = one_side(vision["image_size"]), one_side(vision["patch_size"])
    num_patches = image_px // patch_px
    if num_patches == 0 or num_patches % MERGED_SIDE:
        raise ConfigError(
            f"Tiles of {image_px} px have {num_patches} patches of {patch_px} px a side",
            allowed=f"A multiple of {MERGED_SIDE}",
            cure=f"Make image_size a multiple of {MERGED_SIDE * patch_px} px",
        )


@lru_cache(maxsize=4096)
def arrange(
    width_px: int, height_px: int, *, side_px: int, least: int, most: int
) -> tuple[int, int]:
    """Return (columns, rows) of the tiles that an image is cut into.

    Those whose aspect is closest to the image's; of several, more tiles while the image has more
    than half of their area.

    Source: `get_optimal_tiled_canvas` of transformers' got_ocr2 image processor.
    """
    aspect, area = width_px / height_px, width_px * height_px
    best, best_distance = (1, 1), float("inf")
    for columns, rows in _arrangements(least, most):
        distance = abs(aspect - columns / rows)
        if distance < best_distance:
            best, best_distance = (columns, rows), distance
        elif distance == best_distance and area > 0.5 * side_px * side_px * columns * rows:
            best = (columns, rows)
    return best


@lru_cache(maxsize=16)
def _arrangements(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """List (columns, rows) of so many tiles, those of few first."""
    found = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if least <= columns * rows <= most
    ]
    return tuple(sorted(found, key=lambda shape: shape[0] * shape[1]))
