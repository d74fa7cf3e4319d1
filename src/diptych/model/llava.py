"""LLaVA as transformers sees it, and every composition of a vision tower with a decoder."""

from __future__ import annotations

from typing import Any

from transformers import LlavaConfig, PreTrainedConfig

from diptych.core.records import TokenIds
from diptych.model.tiles import build_config, inputs, read_sizes, token_pairs
from diptych.shape.llava import check_sizes
from diptych.shape.widths import Sizes

__all__ = ["config_of", "inputs", "sizes_of", "token_pairs"]

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
    """Read the sizes out of a config, complete and checked.

    Raises:
        ConfigError: the config has sizes that cannot work.
    """
    sizes = read_sizes(config, own=_OWN)
    check_sizes(sizes)
    return sizes
