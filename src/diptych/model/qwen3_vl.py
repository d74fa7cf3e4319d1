"""Qwen3-VL as transformers sees it: sizes into its config, its config into sizes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, Qwen3VLConfig

from diptych.core.records import TokenIds
from diptych.shape.qwen3_vl_sizes import TextSizes, VisionSizes, complete
from diptych.shape.widths import Sizes


def config_of(sizes: Sizes, *, tie_word_embeddings: bool, tokens: TokenIds | None) -> Qwen3VLConfig:
    """Write transformers' config from sizes; without `tokens` its token ids stay the defaults.

    The text config names no padding token: an embedding with one never trains that row, which is
    wrong where the padding token is also a stop token.
    """
    found = complete(sizes)
    text, vision = found["text"], found["vision"]
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": text.pop("rope_theta"),
        "mrope_section": text.pop("mrope_section"),
        "mrope_interleaved": True,
    }
    vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": vision.pop("rope_theta")}
    ids: dict[str, Any] = {}
    if tokens is not None:
        ids = {
            "image_token_id": tokens.image,
            "video_token_id": tokens.video,
            "vision_start_token_id": tokens.vision_start,
            "vision_end_token_id": tokens.vision_end,
        }
    return Qwen3VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=tie_word_embeddings, **ids
    )


def sizes_of(config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """Read the sizes out of a config, complete and checked.

    Raises:
        ConfigError: the config has sizes that cannot work.
    """
    text, vision = config.text_config.to_dict(), config.vision_config.to_dict()
    for group in (text, vision):
        group["rope_theta"] = group["rope_parameters"]["rope_theta"]
    text["mrope_section"] = text["rope_parameters"].get("mrope_section")
    return complete(
        {
            "text": {name: text.get(name) for name in TextSizes.model_fields},
            "vision": {name: vision.get(name) for name in VisionSizes.model_fields},
        }
    )


def token_pairs(
    config: PreTrainedConfig, *, tokens: TokenIds
) -> tuple[tuple[str, int | None, int | None], ...]:
    """Name the token ids that the model finds images by."""
    return (
        ("image_token_id", config.image_token_id, tokens.image),
        ("vision_start_token_id", config.vision_start_token_id, tokens.vision_start),
        ("vision_end_token_id", config.vision_end_token_id, tokens.vision_end),
    )


def inputs(
    *,
    input_ids_BS: torch.Tensor,
    position_ids_3BS: torch.Tensor,
    pixel_values_PD: torch.Tensor | None,
    grid_thw_I3: torch.Tensor | None,
    mask_B1SS: torch.Tensor | None,
) -> dict[str, Any]:
    """Name what the model's body takes; patches and positions are what we have."""
    return {
        "input_ids": input_ids_BS,
        "attention_mask": mask_B1SS,
        "position_ids": position_ids_3BS,
        "pixel_values": pixel_values_PD,
        "image_grid_thw": grid_thw_I3,
    }
