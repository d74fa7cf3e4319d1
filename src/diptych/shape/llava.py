"""LLaVA's arithmetic: one square tile an image, any vision tower, any decoder, two layers between.

A composition of a vision tower (CLIP, SigLIP) with a decoder (Llama, Qwen) is a LLaVA: transformers
builds either from the config.
"""

from __future__ import annotations

from diptych.shape.anatomy import Anatomy
from diptych.shape.tiles import CLASS_TOKENS, Tiles, decoder_widths, tile_patches, vision_widths
from diptych.shape.widths import Sizes, Widths

ANATOMY = Anatomy(
    vision="model.vision_tower",
    vision_blocks="model.vision_tower.encoder.layers",
    connectors=("model.multi_modal_projector",),
    decoder="model.language_model",
    decoder_blocks="model.language_model.layers",
)


class Llava(Tiles):
    """The family `llava`; see `shape.families.Family` for what each method promises."""

    def __init__(self) -> None:
        super().__init__("llava", anatomy=ANATOMY)

    def tile_tokens(self, sizes: Sizes) -> int:
        """Count a tile's patches, and its class token where the model keeps it."""
        keeps = sizes["model"]["vision_feature_select_strategy"] == "full"
        extra = CLASS_TOKENS.get(sizes["vision"]["model_type"], 0)
        return tile_patches(sizes["vision"]) + (extra if keeps else 0)

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


def unused_vision(sizes: Sizes) -> tuple[str, ...]:
    """Name what comes after the layer of the vision tower that `vision_feature_layer` names.

    Hidden states count from the embeddings, 0; the last of them is not normalised.
    """
    num_layers = sizes["vision"]["num_hidden_layers"]
    chosen = sizes["model"]["vision_feature_layer"]
    layers = [chosen] if isinstance(chosen, int) else list(chosen)
    last = max(layer if layer >= 0 else num_layers + 1 + layer for layer in layers)
    unread = tuple(f"{ANATOMY.vision_blocks}.{index}.*" for index in range(last, num_layers))
    tower = ANATOMY.vision
    return (*unread, f"{tower}.post_layernorm.*", f"{tower}.head.*")
