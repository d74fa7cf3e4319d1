"""Qwen2.5-VL as transformers sees it: sizes into its config, its config into sizes."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, Qwen2_5_VLConfig

from diptych.core.records import TokenIds
from diptych.model.qwen3_vl import inputs as inputs
from diptych.model.tiles import build_config, read_sizes
from diptych.shape.qwen2_5_vl import TEXT, VISION, check_sizes, mrope_section
from diptych.shape.widths import Sizes


def config_of(
    sizes: Sizes, *, tie_word_embeddings: bool, tokens: TokenIds | None
) -> PreTrainedConfig:
    """Write transformers' config from sizes; without `tokens` its token ids stay the defaults.

    Absent, `vision.out_hidden_size` is the decoder's width and `mrope_section` is Qwen's, scaled to
    the head.
    """
    ids: dict[str, Any] = {}
    if tokens is not None:
        ids = {
            "image_token_id": tokens.image,
            "video_token_id": tokens.video,
            "vision_start_token_id": tokens.vision_start,
            "vision_end_token_id": tokens.vision_end,
        }
    config = build_config(
        Qwen2_5_VLConfig,
        sizes=sizes,
        text=TEXT,
        vision=VISION,
        own=(),
        text_ids={"bos_token_id": None, "eos_token_id": tokens.eos if tokens else None},
        tie_word_embeddings=tie_word_embeddings,
        **{name: value for name, value in ids.items() if value is not None},
    )
    text, vision = config.text_config, config.vision_config
    if "out_hidden_size" not in sizes.get("vision", {}):
        vision.out_hidden_size = text.hidden_size
    if text.num_attention_heads:
        head_dim = text.hidden_size // text.num_attention_heads
        text.rope_parameters.setdefault("mrope_section", mrope_section(head_dim))
    return config


def sizes_of(config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """Read the sizes out of a config, complete and checked.

    Raises:
        ConfigError: the config has sizes that cannot work.
    """
    sizes = read_sizes(config, own=())
    check_sizes(sizes)
    return sizes


def token_pairs(
    config: PreTrainedConfig, *, tokens: TokenIds
) -> tuple[tuple[str, int | None, int | None], ...]:
    """Name the token ids that the model, or whoever serves it, finds images by."""
    return (
        ("image_token_id", config.image_token_id, tokens.image),
        ("vision_start_token_id", config.vision_start_token_id, tokens.vision_start),
        ("vision_end_token_id", config.vision_end_token_id, tokens.vision_end),
    )
