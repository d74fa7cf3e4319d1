"""The function that computes attention: told to a model by name, and what it is given for a mask.

In: a model, a kernel's name; then the ids and segments of a micro-batch. Out: the model's decoder
changed in place; what its body takes for a mask. transformers looks attention up by name in every
forward, so the name is all that changes. Vision towers keep `scaled_dot_product_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flex_attention_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from diptych.core.packages import missing_kernels
from diptych.core.records import Kernel, Layout
from diptych.model.attention.masks import MaskRule, blocks, dense, lengths
from diptych.shape.attention import Choice, choose, objection, situation_of
from diptych.shape.widths import Sizes

_FP32 = "sdpa_fp32"
"""The name under which transformers finds `scaled_dot_product_attention` in fp32."""

_FLEX = "flex_in_one_dtype"
"""Likewise FlexAttention behind a cast."""

_NAMES: dict[Kernel, str] = {
    "sdpa": "sdpa",
    "flex": _FLEX,
    "flash_2": "flash_attention_2",
    "flash_3": "flash_attention_3",
    "flash_4": "flash_attention_4",
}
"""What transformers calls each kernel."""


@dataclass(frozen=True)
class Seen:
    """What a model's body is told of who sees whom.

    Attributes:
        mask: what stands where an attention mask goes: a mask, one by kind of layers, or None.
        keywords: what is passed on to every layer beside it.
    """

    mask: Any
    keywords: dict[str, Any]


def choose_with_others(
    layout: Layout,
    *,
    model_family: str,
    sizes: Sizes,
    is_packed: bool,
    device: torch.device,
    gather: Callable[[Sequence[float]], np.ndarray],
) -> Choice:
    """Choose a kernel that runs on every rank; all ranks choose alike.

    Args:
        layout: what is to run, which may name one.
        model_family: the model's.
        sizes: complete ones.
        is_packed: whether rows hold several samples.
        device: this rank's.
        gather: collects a few numbers of every rank, [ranks, numbers].

    Raises:
        LayoutError: the one that the layout names cannot run, here or on another rank.
    """
    on_gpu = device.type == "cuda"
    situation = situation_of(
        layout,
        model_family=model_family,
        sizes=sizes,
        is_packed=is_packed,
        capability=torch.cuda.get_device_capability(device) if on_gpu else None,
        missing=missing_kernels(tries_import=True) if on_gpu else None,
    )
    able = [objection(kernel, situation) is None for kernel in _NAMES]
    elsewhere: dict[Kernel, str] = {}
    for number, row in enumerate(gather(able).astype(bool)):
        for kernel, runs in zip(_NAMES, row, strict=True):
            if not runs:
                elsewhere.setdefault(kernel, f"rank {number} cannot run it")
    return choose(layout.attention, situation=situation, elsewhere=elsewhere)


def use(model: nn.Module, *, kernel: Kernel) -> None:
    """Have a model's decoder compute attention with a kernel."""
    _register()
    _decoder_config(model)._attn_implementation = _NAMES[kernel]


def seen_by(
    model: nn.Module,
    *,
    rule: MaskRule,
    input_ids_BS: torch.Tensor,
    segment_ids_BS: torch.Tensor | None,
) -> Seen:
    """Say who sees whom in a micro-batch, in the form that the model's kernel takes.

    Args:
        model: whose decoder's kernel counts.
        rule: the family's.
        input_ids_BS: [B, S] int64.
        segment_ids_BS: [B, S] integers where rows hold several samples; None: a row is one.
    """
    rows = {"input_ids_BS": input_ids_BS, "segment_ids_BS": segment_ids_BS}
    name = str(_decoder_config(model)._attn_implementation)
    if name == _FLEX:
        return Seen(blocks(rule, **rows), {})
    if name.startswith("flash_"):
        assert rule.image_token_id is None, "no kernel of Flash Attention looks ahead"
        return Seen(None, dict(lengths(**rows)))
    return Seen(dense(rule, **rows), {})


def keep_fp32(model: nn.Module) -> None:
    """Have every attention of a model compute its products and softmax in fp32."""
    _register()
    config = model.config
    assert isinstance(config, PreTrainedConfig), "a model of transformers"
    for each in (config, *(getattr(config, name) for name in config.sub_configs)):
        each._attn_implementation = _FP32


def _decoder_config(model: nn.Module) -> PreTrainedConfig:
    config = model.config
    assert isinstance(config, PreTrainedConfig), "a model of transformers"
    return config.get_text_config()


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


def _attend_in_one_dtype(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run FlexAttention on queries, keys and values of the value's dtype.

    Autocast knows it not, and rotary tables in fp32 widen queries and keys.

    Args:
        module: the attention layer.
        query: [B, heads, S, head width].
        key: [B, heads of keys, S, head width].
        value: [B, heads of keys, S, head width].
        attention_mask: torch's BlockMask.
        options: what transformers passes on: scaling, dropout.
    """
    return flex_attention_forward(
        module, query.to(value.dtype), key.to(value.dtype), value, attention_mask, **options
    )


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


@cache
def _register() -> None:
    ALL_ATTENTION_FUNCTIONS.register(_FP32, _attend_in_fp32)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_FP32, sdpa_mask)
    ALL_ATTENTION_FUNCTIONS.register(_FLEX, _attend_in_one_dtype)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_FLEX, flex_attention_mask)
