"""Gemma 3 as transformers sees it: sizes into its config and back, and what its layers may see."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Gemma3Config, PreTrainedConfig

from diptych.core.records import TokenIds
from diptych.model.attention.masks import MaskRule, windows_of
from diptych.model.tiles import as_tiles, build_config, read_sizes
from diptych.shape.gemma3 import TEXT, VISION, check_sizes
from diptych.shape.widths import Sizes

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
    sizes = read_sizes(config, own=_OWN)
    check_sizes(sizes)
    return sizes


def token_pairs(
    config: PreTrainedConfig, *, tokens: TokenIds
) -> tuple[tuple[str, int | None, int | None], ...]:
    """Name the token id that the model finds images by, and those around an image."""
    return (
        ("image_token_index", config.image_token_index, tokens.image),
        ("boi_token_index", config.boi_token_index, tokens.vision_start),
        ("eoi_token_index", config.eoi_token_index, tokens.vision_end),
    )


def mask_rule(config: PreTrainedConfig) -> MaskRule:
    """Say what layers see: all of a row or a window of it, and an image's tokens each other.

    Source: `create_masks_for_vision_model` of transformers' Gemma 3. The window cuts what came
    before, in an image too.
    """
    return MaskRule(windows=windows_of(config.text_config), image_token_id=config.image_token_index)


def inputs(
    *,
    input_ids_BS: torch.Tensor,
    position_ids_3BS: torch.Tensor,
    pixel_values_PD: torch.Tensor | None,
    grid_thw_I3: torch.Tensor | None,
    mask_B1SS: Any,
) -> dict[str, Any]:
    """Name what the model's body takes: tiles, one position a token, a mask by kind of layer."""
    return {
        "input_ids": input_ids_BS,
        "attention_mask": mask_B1SS,
        "position_ids": position_ids_3BS[0],
        "pixel_values": None if pixel_values_PD is None else as_tiles(pixel_values_PD),
    }
