"""Replicated weights: every rank holds the whole model, gradients are averaged in buckets."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diptych.core.records import Layout
from diptych.parallel.mesh import World


def replicate(
    module: nn.Module, *, layout: Layout, world: World
) -> tuple[nn.Module, Callable[[bool], AbstractContextManager[None]]]:
    """Wrap in DDP; a world of one is left as it is.

    Returns:
        The module to call, and the context of one micro-batch (gradients travel with the last one
        only, unless the layout says `every`).
    """
    if world.size == 1:
        return module, lambda last: nullcontext()
    wrapped = DistributedDataParallel(
        module,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **_buffers_stay_local(),
    )

    def accumulate(last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last or layout.grad_sync == "every" else wrapped.no_sync()

    return wrapped, accumulate


def _buffers_stay_local() -> dict[str, Any]:
    """Name the argument as this torch does: recent ones renamed `broadcast_buffers`."""
    names = inspect.signature(DistributedDataParallel).parameters
    recent = "forward_sync_buffers"
    return {recent if recent in names else "broadcast_buffers": False}
