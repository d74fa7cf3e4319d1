"""LLaVA-OneVision as transformers sees it, with any vision tower and any dense decoder."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from transformers import LlavaOnevisionConfig, PreTrainedConfig

from diptych.core.records import TokenIds
from diptych.model import tiles
from diptych.model.tiles import build_config, read_sizes, token_pairs
from diptych.shape.llava_onevision import UNCUT, check_sizes, default_resolutions
from diptych.shape.tiles import one_side
from diptych.shape.widths import Sizes

__all__ = ["config_of", "inputs", "sizes_of", "token_pairs"]

_OWN = (
    "vision_feature_layer",
    "vision_feature_select_strategy",
    "projector_hidden_act",
    "multimodal_projector_bias",
    "image_grid_pinpoints",
    "vision_aspect_ratio",
)


def config_of(
    sizes: Sizes, *, tie_word_embeddings: bool, tokens: TokenIds | None
) -> PreTrainedConfig:
    """Write transformers' config from sizes; without `tokens` its token ids stay the defaults.

    Without `image_grid_pinpoints` an image has up to six tiles each way.
    """
    ids: dict[str, Any] = {}
    if tokens is not None:
        named = {"image_token_index": tokens.image, "video_token_index": tokens.video}
        ids = {name: token for name, token in named.items() if token is not None}
    config = build_config(
        LlavaOnevisionConfig,
        sizes=sizes,
        text="qwen2",
        vision="siglip_vision_model",
        own=_OWN,
        tie_word_embeddings=tie_word_embeddings,
        **ids,
    )
    if "image_grid_pinpoints" not in sizes.get("model", {}):
        resolutions = default_resolutions(one_side(config.vision_config.image_size))
        config.image_grid_pinpoints = [list(pair) for pair in resolutions]
    return config


def sizes_of(config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """Read the sizes out of a config, complete and checked.

    Raises:
        ConfigError: the config has sizes that cannot work.
    """
    return read_sizes(config, own=_OWN, check=check_sizes)


def inputs(
    *,
    input_ids_BS: torch.Tensor,
    position_ids_3BS: torch.Tensor,
    pixel_values_PD: torch.Tensor | None,
    grid_thw_I3: torch.Tensor | None,
    mask_B1SS: torch.Tensor | None,
) -> dict[str, Any]:
    """Name what the model's body takes: tiles in a row, images' sizes, and which of them are cut.

    The model asks how many images each conversation has, and cuts one that is alone. Images that
    are not cut stand side by side, never one alone: they count as one conversation.
    """
    named = tiles.inputs(
        input_ids_BS=input_ids_BS,
        position_ids_3BS=position_ids_3BS,
        pixel_values_PD=pixel_values_PD,
        grid_thw_I3=grid_thw_I3,
        mask_B1SS=mask_B1SS,
    )
    if pixel_values_PD is None or grid_thw_I3 is None:
        return named
    sizes = grid_thw_I3[:, 1:].tolist()
    num_images: list[int] = []
    for is_uncut, group in groupby(sizes, key=lambda size: tuple(size) == UNCUT):
        number = len(list(group))
        assert not (is_uncut and number == 1), "an image that is alone is cut"
        num_images += [number] if is_uncut else [1] * number
    return named | {"image_sizes": sizes, "batch_num_images": num_images}
