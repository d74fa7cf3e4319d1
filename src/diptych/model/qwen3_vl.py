"""Qwen3-VL as transformers sees it: sizes into its config, its config into sizes."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, Qwen3VLConfig

from diptych.core.records import TokenIds
from diptych.shape.families import family
from diptych.shape.qwen3_vl_sizes import TextSizes, VisionSizes


def config_of(
    sizes: dict[str, dict[str, Any]], *, tie_word_embeddings: bool, tokens: TokenIds | None
) -> Qwen3VLConfig:
    """Write transformers' config from sizes; without `tokens` its token ids stay the defaults.

    The text config names no padding token: an embedding with one never trains that row, which is
    wrong where the padding token is also a stop token.
    """
    complete = family("qwen3_vl").resolve(sizes)
    text, vision = complete["text"], complete["vision"]
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
    return family("qwen3_vl").resolve(
        {
            "text": {name: text.get(name) for name in TextSizes.model_fields},
            "vision": {name: vision.get(name) for name in VisionSizes.model_fields},
        }
    )
