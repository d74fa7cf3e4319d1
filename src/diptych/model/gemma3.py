"""Gemma 3 as transformers sees it: sizes into its config and back, and what its layers may see."""

from __future__ import annotations

from typing import Any

from transformers import Gemma3Config, PreTrainedConfig

from diptych.core.records import TokenIds
from diptych.model import tiles
from diptych.model.attention.masks import MaskRule, windows_of
from diptych.model.tiles import build_config, inputs, read_sizes
from diptych.shape.gemma3 import TEXT, VISION, check_sizes
from diptych.shape.widths import Sizes

__all__ = ["config_of", "inputs", "mask_rule", "sizes_of", "token_pairs"]

_OWN = ("mm_tokens_per_image",)


def config_of(sizes: Sizes, *, tie_word_embeddings: bool, tokens: TokenIds | None) -> Gemma3Config:
    """Write transformers' config from sizes; without `tokens` its token ids stay the defaults.

    The tower has no pooling head, as in Google's releases: nothing would read it. The decoder
    names no padding token, whose embedding would never train.
    """
    groups = {group: dict(values) for group, values in sizes.items()}
    groups["vision"] = {"vision_use_head": False, **groups.get("vision", {})}
    groups["text"] = {"pad_token_id": None, **groups.get("text", {})}
    ids: dict[str, Any] = {}
    if tokens is not None:
        ids = {
            "image_token_index": tokens.image,
            "boi_token_index": tokens.vision_start,
            "eoi_token_index": tokens.vision_end,
        }
    return build_config(
        Gemma3Config,
        sizes=groups,
        text=TEXT,
        vision=VISION,
        own=_OWN,
        tie_word_embeddings=tie_word_embeddings,
        **ids,
    )


def sizes_of(config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """Read the sizes out of a config, checked.

    Raises:
        ConfigError: the config has sizes that cannot work.
    """
    return read_sizes(config, own=_OWN, check=check_sizes)


def token_pairs(
    config: PreTrainedConfig, *, tokens: TokenIds
) -> tuple[tuple[str, int | None, int | None], ...]:
    """Name the token id that the model finds images by, and those around an image."""
    return (
        *tiles.token_pairs(config, tokens=tokens),
        ("boi_token_index", config.boi_token_index, tokens.vision_start),
        ("eoi_token_index", config.eoi_token_index, tokens.vision_end),
    )


def mask_rule(config: PreTrainedConfig) -> MaskRule:
    """Say what layers see: all of a row or a window of it, and an image's tokens each other.

    Source: `create_masks_for_vision_model` of transformers' Gemma 3. The window cuts what came
    before, in an image too.
    """
    return MaskRule(windows=windows_of(config.text_config), image_token_id=config.image_token_index)
