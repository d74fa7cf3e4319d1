"""The engine of torch's own layouts: one process, DDP, FSDP2.

In: a module, its units, a layout. Out: an `Engine` whose tensors are the live ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from diptych.core.records import Layout
from diptych.model.families import Unit
from diptych.model.parameters import list_parameters
from diptych.parallel import ddp, fsdp, moments, precision, storage
from diptych.parallel.engine import BuildOptimizer, Update, Weights, set_lr
from diptych.parallel.loss_scale import LossScaler
from diptych.parallel.mesh import World, build_mesh


class NativeEngine:
    """See `parallel.engine.Engine` for what each method promises."""

    can_drop_gradient = True

    def __init__(
        self,
        module: nn.Module,
        *,
        model: nn.Module,
        units: Sequence[Unit],
        layout: Layout,
        world: World,
        build_optimizer: BuildOptimizer,
        weights: Weights | None = None,
    ) -> None:
        self.model = model
        self._scaler = LossScaler(layout.mixed_precision.loss_scale) if layout.is_fp16 else None
        self._world_size = world.size
        if layout.engine == "fsdp2":
            self.module = module
            self._accumulate = fsdp.shard(
                module, model=model, units=units, mesh=build_mesh(layout), layout=layout
            )
            self._replicas = None
            if weights is not None:
                # Shards that are offloaded stay in the host's memory.
                place = torch.device("cpu") if layout.fsdp.offload else world.device
                weights.fill(module, device=place)
        else:
            if weights is not None:
                weights.fill(module, device=world.device)
            self._replicas = ddp.replicate(module, layout=layout, world=world)
            self.module, self._accumulate = self._replicas.module, self._replicas.accumulate
        self._autocast = precision.autocast(layout)
        # Listed once: walking the modules takes longer than clipping.
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._towers = [each.tower for each in list_parameters(model) if each.trains]
        self.optimizer = build_optimizer(model)
        moments.follow(self.optimizer)

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Hold gradients back until the step's last micro-batch, where the layout says so."""
        return self._accumulate(is_last)

    def autocast(self) -> AbstractContextManager[Any]:
        """Enter the precision of forward passes."""
        return self._autocast()

    def backward(
        self,
        loss: torch.Tensor,
        *,
        weight: float,
        computed: Callable[[], None] | None = None,
    ) -> None:
        """Add a loss' gradient; torch averages over ranks what is to be summed."""
        scale = self._scaler.scale if self._scaler else 1.0
        weighted = loss * (weight * self._world_size * scale)
        if computed is not None:
            # Queued before DDP and FSDP2 queue their waiting for others, so it is called before it.
            queue = Variable._execution_engine.queue_callback
            weighted.register_hook(lambda _: queue(computed))
        weighted.backward()

    def update(self, *, lr: float, max_grad_norm: float) -> Update:
        """Clip, update, drop the gradient."""
        set_lr(self.optimizer, lr=lr)
        scale = self._scaler.scale if self._scaler else 1.0
        grad_norm, by_tower = _clip(
            self._parameters, towers=self._towers, max_norm=max_grad_norm, scale=scale
        )
        if self._replicas is not None:
            grad_norm = self._replicas.agree(grad_norm)
        applied = math.isfinite(grad_norm)
        if applied:
            self.optimizer.step()
        if self._replicas is not None:
            self._replicas.after_update(self._parameters, applied=applied)
        self.optimizer.zero_grad(set_to_none=True)
        if self._scaler is None:
            return Update(grad_norm, applied, grad_norm_by_tower=by_tower)
        can_shrink = self._scaler.observe(applied)
        return Update(
            grad_norm,
            applied,
            loss_scale=scale,
            can_shrink=can_shrink,
            grad_norm_by_tower=by_tower,
        )

    def drop_gradient(self) -> None:
        """Forget the gradient of the backward passes since the last update."""
        if self._replicas is not None:
            self._replicas.forget()
        self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name the live parameters and moments."""
        if self._replicas is not None:
            self._replicas.settle(self._parameters, optimizer=self.optimizer)
        else:
            fsdp.reshard(self.module)
        return storage.tensors_of(self.model, optimizer=self.optimizer)

    def take(self, tensors: Mapping[str, torch.Tensor], *, num_updates: int) -> None:
        """Set the step counters; the tensors are the live ones."""
        if self._replicas is None:
            fsdp.reshard(self.module)
        moments.set_steps(self.optimizer, num_steps=num_updates)

    def state(self) -> dict[str, Any]:
        """Return the loss scale and what counts replicas' steps, where there are any."""
        state: dict[str, Any] = {}
        if self._scaler:
            state["loss_scale"] = self._scaler.state()
        if self._replicas is not None and (replicas := self._replicas.state()):
            state["replicas"] = replicas
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the loss scale; one that was not there begins anew."""
        if self._scaler and state.get("loss_scale"):
            self._scaler.restore(state["loss_scale"])
        if self._replicas is not None:
            self._replicas.restore(state.get("replicas", {}))

    def close(self) -> None:
        """Do nothing: what is on the module goes with it."""


def _clip(
    parameters: Sequence[nn.Parameter], *, towers: Sequence[str], max_norm: float, scale: float
) -> tuple[float, dict[str, float]]:
    """Scale gradients that are `scale` times too large to a global L2 norm of at most `max_norm`.

    Returns:
        The norm before that, without the scale; and that of each tower.
    """
    trained = [
        (tower, each.grad)
        for tower, each in zip(towers, parameters, strict=True)
        if each.grad is not None
    ]
    if not trained:
        return 0.0, {}
    gradients = [gradient for _, gradient in trained]
    norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage]
    norms_P = torch.stack([each.to(norms[0].device) for each in norms])
    if isinstance(norms_P, DTensor):
        # One all-reduce of as many numbers as there are gradients.
        norms_P = norms_P.full_tensor()
    norm = torch.linalg.vector_norm(norms_P) / scale
    factor = float((max_norm / (norm + 1e-6)).clamp(max=1.0)) / scale
    if factor != 1.0:
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
    squares: dict[str, float] = {}
    for (tower, _), own in zip(trained, norms_P.tolist(), strict=True):
        squares[tower] = squares.get(tower, 0.0) + own**2
    return float(norm), {tower: math.sqrt(each) / scale for tower, each in squares.items()}
