"""InternVL as transformers sees it, with any dense decoder."""

from __future__ import annotations

from typing import Any

from transformers import InternVLConfig, PreTrainedConfig

from diptych.core.records import TokenIds
from diptych.model.tiles import build_config, inputs, read_sizes, token_pairs
from diptych.shape.internvl import InternVL, check_sizes
from diptych.shape.widths import Sizes

__all__ = ["config_of", "inputs", "sizes_of", "token_pairs"]

_OWN = (
    "downsample_ratio",
    "projector_hidden_act",
    "vision_feature_layer",
    "vision_feature_select_strategy",
)


def config_of(
    sizes: Sizes, *, tie_word_embeddings: bool, tokens: TokenIds | None
) -> PreTrainedConfig:
    """Write transformers' config from sizes; without `tokens` its token ids stay the defaults."""
    ids: dict[str, Any] = {} if tokens is None else {"image_token_id": tokens.image}
    config = build_config(
        InternVLConfig,
        sizes=sizes,
        text="qwen2",
        vision="internvl_vision",
        own=_OWN,
        tie_word_embeddings=tie_word_embeddings,
        **ids,
    )
    config.image_seq_length = InternVL().tile_tokens(sizes_of(config))
    return config


def sizes_of(config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """Read the sizes out of a config, complete and checked.

    Raises:
        ConfigError: the config has sizes that cannot work.
    """
    return read_sizes(config, own=_OWN, check=check_sizes)
