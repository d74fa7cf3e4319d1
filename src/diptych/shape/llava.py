"""LLaVA's arithmetic: one square tile an image, CLIP or SigLIP, any decoder, two layers between.

A composition of a vision tower (CLIP, SigLIP) with a decoder (Llama, Qwen) is a LLaVA: transformers
builds either from the config.
"""

from __future__ import annotations

from diptych.core.errors import ConfigError
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


TOWERS = ("clip_vision_model", "siglip_vision_model")
"""Vision towers of which the number of tokens is known, by transformers' names."""


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


def check_sizes(sizes: Sizes) -> None:
    """Refuse sizes with which transformers' model cannot run.

    Raises:
        ConfigError: the vision tower is another one, or the connector reads a layer that it has
            not, or drops a patch for a class token.
    """
    vision, model = sizes["vision"], sizes["model"]
    tower, num_layers = vision["model_type"], vision["num_hidden_layers"]
    if tower not in TOWERS:
        raise ConfigError(
            f"plan.model.sizes.vision.model_type is '{tower}'",
            allowed=" and ".join(TOWERS),
            cure="Set it to one of these, or choose other weights",
        )
    if model["vision_feature_select_strategy"] == "default" and tower not in CLASS_TOKENS:
        raise ConfigError(
            "plan.model.sizes.model.vision_feature_select_strategy is default, which drops a "
            f"tile's class token, and a tower '{tower}' has none",
            allowed="full for such a tower",
            cure="Set it to full",
        )
    chosen = model["vision_feature_layer"]
    for layer in [chosen] if isinstance(chosen, int) else chosen:
        if not -num_layers - 1 <= layer <= num_layers:
            raise ConfigError(
                f"plan.model.sizes.model.vision_feature_layer is {layer}",
                allowed=f"The tower has {num_layers} layers: {-num_layers - 1} to {num_layers}",
                cure="Correct it; left out, the last but one is read",
            )
