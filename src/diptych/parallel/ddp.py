"""Replicated weights: every rank holds the whole model, gradients are averaged in buckets.

A module and a layout flow in; a module to call, and what ranks have to agree on, flow out. What
travels in a bucket is a communication hook of torch: whole gradients, halves, factors (PowerSGD),
or nothing but within a node (local SGD).
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from diptych.core.records import DdpOptions, Layout
from diptych.parallel.mesh import World, gather_numbers

_BYTES_PER_MIB = 1024**2
_DEFAULT_BUCKET_BYTES = DdpOptions.model_fields["bucket_bytes"].default
_HALF_HOOKS = {
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}
_POWERSGD_EPSILON = 1e-8
"""Keeps factors of an all-zero gradient (a tower without work) from becoming NaN."""
_FIRST_COMPRESSED_STEP = 2
"""DDP arranges its buckets anew after the first step, so what is kept by bucket starts later."""


class Replicas:
    """A module on every rank. It counts the process' steps, as hooks do, skipped ones too."""

    def __init__(self, module: nn.Module, *, layout: Layout, world: World) -> None:
        self.module = module
        self._layout = layout
        self._world = world
        self._options = layout.ddp
        self._step = 0
        self._local: PostLocalSGDState | None = None
        self._power: PowerSGDState | None = None
        if isinstance(module, DistributedDataParallel):
            self._register(module)

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Hold gradients back until the step's last micro-batch, unless the layout says `every`."""
        if last or self._layout.grad_sync == "every":
            return nullcontext()
        module = self.module
        return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()

    def agree(self, grad_norm: float) -> float:
        """Agree on one gradient norm, and so on whether this step updates.

        Ranks that train on their own have gradients of their own: the norm of all is the root of
        their mean square, and not finite if one of them is not.
        """
        if not self._is_local:
            return grad_norm
        norms = gather_numbers([grad_norm], world=self._world)
        return float(math.sqrt((norms**2).mean()))

    def after_update(self, parameters: Sequence[nn.Parameter], *, applied: bool) -> None:
        """Count the step; average weights where it is time to."""
        self._step += 1
        if self._local is not None:
            self._local.iter = self._step
            if self._num_local and self._num_local % self._period == 0:
                _average(parameters, num_ranks=self._world.size, chunk=self._options.bucket_bytes)
        if not applied:
            self.forget()

    def forget(self) -> None:
        """Drop what a broken gradient left behind, which would break every later one."""
        if self._power is not None:
            self._power.error_dict.clear()
            self._power.p_memory_dict.clear()
            self._power.q_memory_dict.clear()

    def settle(
        self, parameters: Sequence[nn.Parameter], *, optimizer: torch.optim.Optimizer
    ) -> None:
        """Make weights and moments equal on all ranks, where they are not: local SGD's means."""
        if self._num_local == 0:
            return
        moments = [
            value
            for each in parameters
            for value in optimizer.state[each].values()
            if isinstance(value, torch.Tensor) and value.shape == each.shape
        ]
        _average(
            [*parameters, *moments], num_ranks=self._world.size, chunk=self._options.bucket_bytes
        )

    def state(self) -> dict[str, Any]:
        """Return the count of steps, where something depends on it."""
        counts = self._local is not None or self._power is not None
        return {"step": self._step} if counts else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a count of steps."""
        self._step = int(state.get("step", 0))
        if self._local is not None:
            self._local.iter = self._step
        if self._power is not None:
            # Its errors and factors begin anew, after this process' first whole steps.
            left = self._options.powersgd_start_step - self._step
            self._power.start_powerSGD_iter = max(_FIRST_COMPRESSED_STEP, left)

    @property
    def _period(self) -> int:
        period = self._options.local_sgd_period
        assert period is not None, "asked for only where ranks train on their own"
        return period

    @property
    def _num_local(self) -> int:
        """Count the steps that were taken on one's own."""
        if self._local is None:
            return 0
        return max(0, self._step - self._local.start_localSGD_iter)

    @property
    def _is_local(self) -> bool:
        """Whether the step that runs is on one's own."""
        return self._local is not None and self._step >= self._local.start_localSGD_iter

    def _register(self, module: DistributedDataParallel) -> None:
        options = self._options
        half = _half(self._layout)
        if options.local_sgd_period is not None:
            nodes = _nodes(self._world)
            self._local = PostLocalSGDState(
                process_group=None,
                subgroup=nodes,
                start_localSGD_iter=options.local_sgd_start_step,
                post_local_gradient_allreduce=nodes is not None,
            )
            module.register_comm_hook(self._local, post_localSGD_hook)
        elif options.compression == "powersgd":
            self._power = PowerSGDState(
                process_group=None,
                matrix_approximation_rank=options.powersgd_rank,
                start_powerSGD_iter=options.powersgd_start_step,
                orthogonalization_epsilon=_POWERSGD_EPSILON,  # pyright: ignore[reportArgumentType]
            )
            module.register_comm_hook(self._power, powerSGD_hook)
        elif half is not None:
            module.register_comm_hook(None, _HALF_HOOKS[half])


def replicate(module: nn.Module, *, layout: Layout, world: World) -> Replicas:
    """Wrap in DDP; a world of one is left as it is."""
    options = layout.ddp
    trains = any(each.requires_grad for each in module.parameters())
    if world.size == 1 or not trains:
        return Replicas(module, layout=layout, world=world)
    is_default = options.bucket_bytes == _DEFAULT_BUCKET_BYTES
    wrapped = DistributedDataParallel(
        module,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        # torch's own default has a small first bucket, so that sending begins early.
        bucket_cap_mb=None if is_default else options.bucket_bytes / _BYTES_PER_MIB,  # pyright: ignore[reportArgumentType]
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        static_graph=options.static_graph,
        find_unused_parameters=options.find_unused_parameters,
        **_buffers_by_forward(options.broadcast_buffers),
    )
    return Replicas(wrapped, layout=layout, world=world)


def _half(layout: Layout) -> str | None:
    """Name the 16-bit dtype in which gradients travel, by either of its two settings."""
    if layout.ddp.compression in _HALF_HOOKS:
        return layout.ddp.compression
    reduce = layout.mixed_precision.reduce
    return reduce if reduce in _HALF_HOOKS else None


def _nodes(world: World) -> dist.ProcessGroup | None:
    """Return the group of this node's GPUs; None where each rank trains alone.

    That is on one node, whose group would be all ranks, and on CPUs.
    """
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    if world.device.type == "cpu" or not 1 < per_node < world.size:
        return None
    group, _ = dist.new_subgroups(group_size=per_node)
    return group


@torch.no_grad()
def _average(tensors: Iterable[torch.Tensor], *, num_ranks: int, chunk: int) -> None:
    """Replace tensors by their mean over all ranks, in messages of at most `chunk` bytes or one.

    Differs: torch's `PeriodicModelAverager` copies all weights into one buffer, points them into
    it, and leaves out those without a gradient, which may be others on another rank.
    """
    for bucket in _buckets(tensors, chunk=chunk):
        flat = torch.cat([each.reshape(-1) for each in bucket])
        flat /= num_ranks
        dist.all_reduce(flat)
        parts = flat.split([each.numel() for each in bucket])
        for each, part in zip(bucket, parts, strict=True):
            each.copy_(part.view_as(each))


def _buckets(tensors: Iterable[torch.Tensor], *, chunk: int) -> Iterable[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    num_bytes = 0
    for each in tensors:
        if bucket and num_bytes + each.nbytes > chunk:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(each)
        num_bytes += each.nbytes
    if bucket:
        yield bucket


def _buffers_by_forward(broadcast: bool) -> dict[str, Any]:
    """Name the argument as this torch does: recent ones renamed `broadcast_buffers`."""
    names = inspect.signature(DistributedDataParallel).parameters
    recent = "forward_sync_buffers"
    return {recent if recent in names else "broadcast_buffers": broadcast}
