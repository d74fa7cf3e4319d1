"""What the loop sees of a spread module: call it, give it losses, let it update, save its tensors.

`parallel.spread` makes one; `native` and `zero` are the two kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

BuildOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
"""Makes the optimizer of a model's trained parameters, after or before they are sharded.

A group's `lr_scale` is what the step's learning rate is multiplied by.
"""


def set_lr(optimizer: torch.optim.Optimizer, *, lr: float) -> None:
    """Give every group its rate: the step's, times the group's own scale where it has one."""
    for group in optimizer.param_groups:
        own = lr * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own


class Weights(Protocol):
    """What fills a model that came on the meta device, when its parameters are where they stay."""

    def fill(self, module: nn.Module, *, device: torch.device) -> None:
        """Allocate and fill what this rank holds of a module's parameters."""
        ...

    def allocate(self, module: nn.Module, *, device: torch.device) -> None:
        """Allocate a module's parameters without filling them."""
        ...

    def stream(self, *, dtype: torch.dtype) -> Iterator[nn.Parameter]:
        """Fill the allocated parameters one by one, rounded to a dtype."""
        ...


@dataclass(frozen=True)
class Update:
    """What became of a step.

    Attributes:
        grad_norm: the whole gradient's L2 norm, before clipping and without the loss scale.
        grad_norm_by_tower: that of each tower that trains; empty where the engine looked no further
            once the gradient was not finite.
        applied: False when the gradient was not finite, and no weight has changed.
        loss_scale: the one that the step ran with; None where the loss is not scaled.
        can_shrink: whether the loss scale has room to shrink, so that a skipped step is a search.
    """

    grad_norm: float
    applied: bool
    loss_scale: float | None = None
    can_shrink: bool = False
    grad_norm_by_tower: Mapping[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """A module spread over ranks, with the optimizer that trains it. Every rank calls all of it.

    Attributes:
        module: What to call; it returns the loss of this rank's micro-batch.
        model: The model in it; its parameters' full names are those of checkpoints.
        optimizer: What updates it; to look at, `update` alone moves it.
        can_drop_gradient: Whether `drop_gradient` works.
    """

    module: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    can_drop_gradient: bool

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Enter a micro-batch's forward and backward pass; say whether it is the step's last."""
        ...

    def autocast(self) -> AbstractContextManager[Any]:
        """Enter the precision of forward passes."""
        ...

    def backward(
        self,
        loss: torch.Tensor,
        *,
        weight: float,
        computed: Callable[[], None] | None = None,
    ) -> None:
        """Add the gradient of `weight` times `loss`, summed (not averaged) over ranks.

        `computed` is called once this rank's gradients are computed, where the engine knows; what
        is left then is waiting for other ranks.
        """
        ...

    def update(self, *, lr: float, max_grad_norm: float) -> Update:
        """Clip the gradient at a global L2 norm, update the weights, drop the gradient.

        A gradient that is not finite changes no weight, on any rank.
        """
        ...

    def drop_gradient(self) -> None:
        """Forget the gradient of the backward passes since the last update."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name what a checkpoint holds: parameters, and the optimizer's moments in fp32.

        Each is whole, or a DTensor of which this rank holds its share. They are live or copies:
        whoever writes into them calls `take`.
        """
        ...

    def take(self, tensors: Mapping[str, torch.Tensor], *, num_updates: int) -> None:
        """Go on from a checkpoint's tensors, after so many updates."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside tensors, as JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned, maybe on another engine; {} where there is nothing."""
        ...

    def close(self) -> None:
        """Take off the module what the engine has put on it; the engine is not used again."""
        ...
