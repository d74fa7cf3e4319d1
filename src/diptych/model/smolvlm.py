"""SmolVLM as transformers sees it: sizes into its config, its config into sizes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, SmolVLMConfig

from diptych.core.records import TokenIds
from diptych.model import tiles
from diptych.model.tiles import build_config, read_sizes, token_pairs
from diptych.shape.smolvlm import VISION, check_sizes
from diptych.shape.widths import Sizes

__all__ = ["config_of", "inputs", "sizes_of", "token_pairs"]

_OWN = ("scale_factor",)


def config_of(
    sizes: Sizes, *, tie_word_embeddings: bool, tokens: TokenIds | None
) -> PreTrainedConfig:
    """Write transformers' config from sizes; without `tokens` its token ids stay the defaults."""
    ids: dict[str, Any] = {}
    if tokens is not None:
        ids = {"image_token_id": tokens.image, "pad_token_id": tokens.pad}
    return build_config(
        SmolVLMConfig,
        sizes=sizes,
        text="llama",
        vision=VISION,
        own=_OWN,
        text_ids={"bos_token_id": None, "eos_token_id": tokens.eos if tokens else None},
        tie_word_embeddings=tie_word_embeddings,
        **ids,
    )


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
    """Name what the model's body takes: tiles as if all were one row's, one position a token.

    Every tile is full, so there is no mask of pixels. The model drops a tile that is zero all over;
    `data/described.py` refuses processors that can make one.
    """
    named = tiles.inputs(
        input_ids_BS=input_ids_BS,
        position_ids_3BS=position_ids_3BS,
        pixel_values_PD=pixel_values_PD,
        grid_thw_I3=grid_thw_I3,
        mask_B1SS=mask_B1SS,
    )
    if pixel_values_PD is not None:
        named["pixel_values"] = named["pixel_values"][None]
    return named
