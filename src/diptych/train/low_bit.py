"""AdamW whose moments have eight bits: groups in, torchao's optimizer out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from diptych.core.errors import LayoutError
from diptych.core.records import OptimizerSpec


def build_low_bit(
    groups: Sequence[dict[str, Any]], *, spec: OptimizerSpec
) -> torch.optim.Optimizer:
    """Build it; tensors below 4,096 elements, or that no blocks of 256 fill, keep fp32 moments.

    Its update is compiled on first use.

    Raises:
        LayoutError: torchao is not installed, or weights are sharded.
    """
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise LayoutError(
            f"train.optimizer.kind is adamw_8bit, and torchao cannot be imported: {error}",
            cure="Run: pip install 'diptych[fp8]'; or set train.optimizer.kind to adamw",
        ) from None
    if any(isinstance(each, DTensor) for each in chain(*(group["params"] for group in groups))):
        raise LayoutError(
            "train.optimizer.kind is adamw_8bit, and this layout shards the weights",
            allowed="Blocks of 256 numbers share a scale, wherever a shard ends: engine ddp",
            cure="Set plan.layout.engine to ddp, or train.optimizer.kind to adamw",
        )
    return AdamW8bit(list(groups), lr=spec.lr, betas=spec.betas, eps=spec.eps)
