"""LLaVA as transformers sees it, and every composition of a vision tower with a decoder."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlavaConfig, PreTrainedConfig

from diptych.core.records import TokenIds
from diptych.model.tiles import as_tiles, build_config, read_sizes
from diptych.shape.widths import Sizes

_OWN = (
    "vision_feature_layer",
    "vision_feature_select_strategy",
    "projector_hidden_act",
    "multimodal_projector_bias",
)


def config_of(
    sizes: Sizes, *, tie_word_embeddings: bool, tokens: TokenIds | None
) -> PreTrainedConfig:
    """Write transformers' config from sizes; without `tokens` its token ids stay the defaults."""
    ids: dict[str, Any] = {} if tokens is None else {"image_token_index": tokens.image}
    return build_config(
        LlavaConfig,
        sizes=sizes,
        text="llama",
        vision="clip_vision_model",
        own=_OWN,
        tie_word_embeddings=tie_word_embeddings,
        **ids,
    )


def sizes_of(config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """Read the sizes out of a config."""
    return read_sizes(config, own=_OWN)


def token_pairs(
    config: PreTrainedConfig, *, tokens: TokenIds
) -> tuple[tuple[str, int | None, int | None], ...]:
    """Name the token id that the model finds images by."""
    return (("image_token_index", config.image_token_index, tokens.image),)


def inputs(
    *,
    input_ids_BS: torch.Tensor,
    position_ids_3BS: torch.Tensor,
    pixel_values_PD: torch.Tensor | None,
    grid_thw_I3: torch.Tensor | None,
    mask_B1SS: torch.Tensor | None,
) -> dict[str, Any]:
    """Name what the model's body takes: tiles, and one position a token."""
    return {
        "input_ids": input_ids_BS,
        "attention_mask": mask_B1SS,
        "position_ids": position_ids_3BS[0],
        "pixel_values": None if pixel_values_PD is None else as_tiles(pixel_values_PD),
    }
