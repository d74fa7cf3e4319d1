"""Gemma 3's arithmetic: one square tile an image, its patches averaged into fewer tokens.

The patches of an image, side by side in squares, are averaged into `mm_tokens_per_image` tokens,
which see each other. The tower is SigLIP's, the decoder Gemma 3's, whose layers of one kind see a
window of the row.
"""

from __future__ import annotations

import math
from typing import Any

from diptych.core.errors import ConfigError
from diptych.core.records import AnyImageSettings, TokenIds
from diptych.shape.anatomy import Anatomy
from diptych.shape.tiles import Tiles, decoder_widths, one_side, vision_widths
from diptych.shape.widths import Sizes, Widths

TEXT, VISION = "gemma3_text", "siglip_vision_model"
"""transformers' names of the only towers that the family has."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "text": {"model_type": TEXT, "vocab_size": 262_208},
    "vision": {"model_type": VISION, "image_size": 224, "patch_size": 16},
    "model": {"mm_tokens_per_image": 256},
}
"""What transformers takes where sizes are left out, as far as it is asked for before a model is."""

_ANATOMY = Anatomy(
    vision="model.vision_tower",
    vision_blocks="model.vision_tower.encoder.layers",
    connectors=("model.multi_modal_projector",),
    decoder="model.language_model",
    decoder_blocks="model.language_model.layers",
)


class Gemma3(Tiles):
    """The family `gemma3`; see `shape.families.Family` for what each method promises."""

    sees_ahead = True

    def __init__(self) -> None:
        super().__init__("gemma3", anatomy=_ANATOMY)

    def tile_tokens(self, sizes: Sizes) -> int:
        """Count the averages."""
        return sizes["model"]["mm_tokens_per_image"]

    def unused(self, sizes: Sizes) -> tuple[str, ...]:
        """Name what makes one vector of an image, where the tower has it: nothing reads that."""
        return (f"{_ANATOMY.vision}.head.*",)

    def widths(self, sizes: Sizes) -> Widths:
        """Read the numbers that decide what the model computes and holds."""
        return Widths(
            decoder=decoder_widths(sizes["text"]),
            vision=vision_widths(sizes["vision"], tile_tokens=self.tile_tokens(sizes)),
        )

    def check(self, sizes: Sizes, *, image: AnyImageSettings, tokens: TokenIds) -> None:
        """Refuse sizes that contradict the processor, or each other."""
        whole = {group: known | dict(sizes.get(group, {})) for group, known in _DEFAULTS.items()}
        check_sizes(whole)
        super().check(whole, image=image, tokens=tokens)


def check_sizes(sizes: Sizes) -> None:
    """Refuse sizes that no Gemma 3 can have.

    Raises:
        ConfigError: another tower, patches that do not make whole tokens, or a decoder that looks
            ahead.
    """
    for group, wanted in (("text", TEXT), ("vision", VISION)):
        found = sizes[group]["model_type"]
        if found != wanted:
            raise ConfigError(
                f"plan.model.sizes.{group}.model_type is '{found}', a model of 'gemma3' has a "
                f"'{wanted}'",
                cure=f"Leave it out, or set plan.model.family to llava, which takes any {group} "
                "tower",
            )
    check_tokens(
        one_side(sizes["vision"]["image_size"]),
        patch_px=one_side(sizes["vision"]["patch_size"]),
        num_tokens=sizes["model"]["mm_tokens_per_image"],
    )
    if sizes["text"].get("use_bidirectional_attention"):
        raise ConfigError(
            "plan.model.sizes.text.use_bidirectional_attention is set: such a decoder sees the "
            "answer that it is to learn",
            cure="Set it to false",
        )


def check_tokens(side_px: int, *, patch_px: int, num_tokens: int) -> None:
    """Refuse an image whose patches do not make so many tokens, each of a square of patches.

    Raises:
        ConfigError: the tokens are no square, or a token is no whole number of patches wide.
    """
    tokens_side, patches_side = math.isqrt(max(0, num_tokens)), side_px // patch_px
    if num_tokens < 1 or tokens_side**2 != num_tokens:
        raise ConfigError(
            f"An image of Gemma 3 has {num_tokens} tokens (mm_tokens_per_image)",
            allowed="The square of a whole number: 4, 9, 16, ..., 256",
            cure="Set plan.model.sizes.model.mm_tokens_per_image to one, as the processor has it",
        )
    if side_px % patch_px or not patches_side or patches_side % tokens_side:
        raise ConfigError(
            f"An image of {side_px} px in patches of {patch_px} px does not make "
            f"{tokens_side} x {tokens_side} tokens",
            allowed="An image is a whole number of patches wide, and a token too",
            cure="Choose the image's side as a multiple of the patch times "
            f"{tokens_side}, the tokens of a side",
        )
