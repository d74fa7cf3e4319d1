"""Sharded weights, gradients and optimizer state: FSDP2's `fully_shard`, unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from diptych.core.records import Layout


def shard(
    module: nn.Module, *, units: Sequence[nn.Module], mesh: DeviceMesh, layout: Layout
) -> Callable[[bool], AbstractContextManager[None]]:
    """Shard each unit, then what is left (embedding and head together) in the root.

    Returns:
        The context of one micro-batch: gradients stay whole and local until the last one, or are
        reduced every time (less memory, more bytes) when the layout says `every`.
    """
    policy = MixedPrecisionPolicy()
    if layout.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    used = mesh if layout.dp > 1 else mesh["shard"]
    for unit in units:
        fully_shard(unit, mesh=used, mp_policy=policy)
    fully_shard(module, mesh=used, mp_policy=policy)
    root = cast(FSDPModule, module)

    @contextmanager
    def accumulate(last: bool) -> Iterator[None]:
        root.set_requires_gradient_sync(last or layout.grad_sync == "every")
        root.set_is_last_backward(last)
        yield

    return accumulate
