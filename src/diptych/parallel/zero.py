"""The engine of DeepSpeed's ZeRO, stages 1 to 3.

In: a module in fp32, a layout. Out: an `Engine`. DeepSpeed averages gradients over ranks, which is
undone here, for the loss is a sum. Where it looks for gradients that are not finite in fp16 only,
it is told to look in every dtype. The loss scale is ours: every engine goes on with its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from diptych.core.records import Layout
from diptych.parallel import moments, zero_runtime
from diptych.parallel.engine import BuildOptimizer, Update, Weights, set_lr
from diptych.parallel.loss_scale import LossScaler
from diptych.parallel.mesh import World
from diptych.parallel.precision import DTYPES
from diptych.parallel.zero_config import deepspeed_config
from diptych.parallel.zero_disk import SwapFolders
from diptych.parallel.zero_norms import TowerNorms
from diptych.parallel.zero_tensors import FrozenWeights, ZeroTensors


class ZeroEngine:
    """See `parallel.engine.Engine` for what each method promises."""

    can_drop_gradient = True

    def __init__(
        self,
        module: nn.Module,
        *,
        model: nn.Module,
        layout: Layout,
        world: World,
        build_optimizer: BuildOptimizer,
        weights: Weights | None = None,
    ) -> None:
        self.model = model
        self._world_size = world.size
        self._scaler = LossScaler(layout.mixed_precision.loss_scale) if layout.is_fp16 else None
        dtype = DTYPES[layout.precision]
        if layout.precision != "fp32":
            zero_runtime.cast_inputs(module, dtype=dtype)
        stream = _begin(weights, module=module, model=model, layout=layout, world=world)
        self._disk = SwapFolders(layout, world=world)
        frozen = FrozenWeights(model, layout=layout, world=world)
        trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
        config = deepspeed_config(layout, num_elements=trained)
        optimizer = zero_runtime.adam(build_optimizer(model), layout=layout)
        if stream is not None:
            zero_runtime.cut_up(stream, dtype=dtype, config=config, layout=layout, world=world)
        self._deepspeed = zero_runtime.start(
            module,
            optimizer=optimizer,
            config=config,
            layout=layout,
            world=world,
        )
        self.module: nn.Module = self._deepspeed
        self.optimizer: torch.optim.Optimizer = self._deepspeed.basic_optimizer
        self._tensors = ZeroTensors(
            model,
            optimizer=self._deepspeed.optimizer,
            layout=layout,
            world=world,
            frozen=frozen,
        )
        self._norms = TowerNorms(model, optimizer=self._deepspeed.optimizer, world=world)
        moments.follow(self.optimizer)
        self._set_scale()

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Tell DeepSpeed whether the step's gradient is complete with this micro-batch."""
        self._deepspeed.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        """Change nothing: the weights have the layout's dtype."""
        return nullcontext()

    def backward(
        self,
        loss: torch.Tensor,
        *,
        weight: float,
        computed: Callable[[], None] | None = None,
    ) -> None:
        """Add a loss' gradient; DeepSpeed scales it, and averages over ranks what is a sum."""
        self._deepspeed.backward(loss * (weight * self._world_size))
        zero_runtime.forget_interrupted(self._deepspeed)

    def update(self, *, lr: float, max_grad_norm: float) -> Update:
        """Clip, update, drop the gradient."""
        set_lr(self.optimizer, lr=lr)
        self._deepspeed.optimizer.clip_grad = max_grad_norm
        self._deepspeed.step()
        applied = bool(self._deepspeed.was_step_applied())
        grad_norm = self._deepspeed.get_global_grad_norm()
        scale = self._scaler.scale if self._scaler else 1.0
        by_tower: Mapping[str, float] = {}
        if applied:
            grad_norm, by_tower = self._norms.take(grad_norm, scale=scale)
        else:
            self._norms.forget()
            self.drop_gradient()
        if self._scaler is None:
            return Update(float(grad_norm), applied, grad_norm_by_tower=by_tower)
        can_shrink = self._scaler.observe(applied)
        self._set_scale()
        return Update(
            float(grad_norm),
            applied,
            loss_scale=scale,
            can_shrink=can_shrink,
            grad_norm_by_tower=by_tower,
        )

    def drop_gradient(self) -> None:
        """Empty the buffers in which DeepSpeed adds gradients up."""
        zero_runtime.drop_gradient(self._deepspeed)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copy this rank's rows of every parameter and moment to the host."""
        return self._tensors.read()

    def take(self, tensors: Mapping[str, torch.Tensor], *, num_updates: int) -> None:
        """Write a checkpoint's tensors into DeepSpeed's partitions."""
        self._tensors.write(tensors, num_updates=num_updates)

    def state(self) -> dict[str, Any]:
        """Return the loss scale, if there is one."""
        return {"loss_scale": self._scaler.state()} if self._scaler else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the loss scale; one that was not there begins anew."""
        if self._scaler and state.get("loss_scale"):
            self._scaler.restore(state["loss_scale"])
            self._set_scale()

    def close(self) -> None:
        """Take DeepSpeed's hooks off the module, and its states off a disk."""
        try:
            zero_runtime.stop(self._deepspeed)
        finally:
            self._disk.clear()

    def _set_scale(self) -> None:
        if self._scaler is not None:
            self._deepspeed.optimizer.override_loss_scale(self._scaler.scale)


def _begin(
    weights: Weights | None,
    *,
    module: nn.Module,
    model: nn.Module,
    layout: Layout,
    world: World,
) -> Iterator[nn.Parameter] | None:
    """Fill a module's weights, or return the stream that will, weight by weight: stage 3.

    Where frozen weights are held in low precision, their fp32 rows are taken from the whole model.
    """
    if weights is None:
        return None
    halves = layout.precision != "fp32"
    rounds_frozen = halves and any(not each.requires_grad for each in model.parameters())
    if layout.zero.stage < 3 or rounds_frozen:
        weights.fill(module, device=world.device)
        return None
    # Untouched memory of the host is none; DeepSpeed moves each weight as it cuts it up.
    weights.allocate(module, device=torch.device("cpu"))
    return weights.stream(dtype=DTYPES[layout.precision])
