"""What the loop sees of a spread module: call it, accumulate, clip, name its parameters.

In: a module that returns a loss, its sharding units, a layout. Out: an `Engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from diptych.core.records import Layout
from diptych.parallel import ddp, fsdp
from diptych.parallel.mesh import World, build_mesh


@dataclass(frozen=True)
class Engine:
    """A module spread over ranks.

    Attributes:
        module: What to call; its gradients are averaged over the data-parallel ranks.
        accumulate: A context for one micro-batch; its argument says whether it is the step's last.
        parameters: The module's, listed once: walking the modules takes longer than clipping.
        gradient_scale: What to multiply a loss that is to be summed over ranks by.
        autocast: A context for forward passes.
    """

    module: nn.Module
    parameters: Sequence[nn.Parameter]
    accumulate: Callable[[bool], AbstractContextManager[None]]
    gradient_scale: float
    autocast: Callable[[], AbstractContextManager[Any]]


def spread(
    module: nn.Module, *, units: Sequence[nn.Module], layout: Layout, world: World
) -> Engine:
    """Spread a module over the ranks of a layout.

    Args:
        module: Returns a summed loss; on the rank's device, the same weights on every rank.
        units: The modules that are sharded on their own (fsdp2).
        layout: Which engine, which axes, which precision.
        world: This rank's place.
    """
    if layout.engine == "fsdp2":
        accumulate = fsdp.shard(module, units=units, mesh=build_mesh(layout), layout=layout)
        return Engine(module, list(module.parameters()), accumulate, float(world.size), nullcontext)
    wrapped, accumulate = ddp.replicate(module, layout=layout, world=world)

    def autocast() -> AbstractContextManager[Any]:
        if layout.precision == "bf16":
            return torch.autocast(world.device.type, dtype=torch.bfloat16)
        return nullcontext()

    return Engine(wrapped, list(module.parameters()), accumulate, float(world.size), autocast)


def clip_gradients(parameters: Sequence[nn.Parameter], *, max_norm: float) -> float:
    """Scale all gradients so that their global L2 norm is at most `max_norm`; return the norm."""
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return float(norm)
