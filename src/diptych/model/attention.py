"""Which token may attend to which where a row holds several samples, and attention in fp32.

In: the segment of every token; a model. Out: a mask for `scaled_dot_product_attention`; the model's
attention changed in place.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_FP32 = "sdpa_fp32"
"""The name under which transformers finds `scaled_dot_product_attention` in fp32."""


def mask_segments(segment_ids_BS: torch.Tensor) -> torch.Tensor:
    """Let a token attend to itself and to what came before it in its own sample.

    Padding is a segment of its own (0), so that no row of the mask is empty.

    Args:
        segment_ids_BS: [B, S] integers, equal for the tokens of one sample.

    Returns:
        [B, 1, S, S] bool, True where the second S may be seen by the first.
    """
    num_tokens = segment_ids_BS.shape[1]
    same_BSS = segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :]
    earlier_SS = torch.ones(
        (num_tokens, num_tokens), dtype=torch.bool, device=segment_ids_BS.device
    ).tril()
    return (same_BSS & earlier_SS)[:, None]


def keep_fp32(model: nn.Module) -> None:
    """Have every attention of a model compute its products and softmax in fp32.

    transformers looks the function up by name in every forward, so the name is all that changes.
    """
    _register()
    config = model.config
    assert isinstance(config, PreTrainedConfig), "a model of transformers"
    for each in (config, *(getattr(config, name) for name in config.sub_configs)):
        each._attn_implementation = _FP32


def _attend_in_fp32(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Run `scaled_dot_product_attention` in fp32, and return what the value's dtype was.

    Args:
        module: the attention layer, which says whether it is causal.
        query: [B, heads, S, head width].
        key: [B, heads of keys, S, head width].
        value: [B, heads of keys, S, head width].
        attention_mask: [B, 1, S, S] bool or additive, or None.
        options: what transformers passes on: scaling, dropout, is_causal.
    """
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = _widen(attention_mask)
    with torch.autocast(value.device.type, enabled=False):
        attended, _ = sdpa_attention_forward(
            module, _widen(query), _widen(key), _widen(value), attention_mask, **options
        )
    return attended.to(value.dtype), None


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


@cache
def _register() -> None:
    ALL_ATTENTION_FUNCTIONS.register(_FP32, _attend_in_fp32)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_FP32, sdpa_mask)
