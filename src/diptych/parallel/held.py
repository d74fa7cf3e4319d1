"""Measure what a rank holds: `with measure_held(engine) as held:` around a step.

In: an engine's live tensors, seen between the last backward pass and the update (gradients) and
right after it (optimizer state). Out: `HeldBytes`. Every storage counts once and whole, so padding
and flat buffers are in it. What a formula says is held is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from diptych.core.records import HeldBytes
from diptych.parallel.engine import Engine, Update
from diptych.parallel.moments import tensors_in
from diptych.parallel.zero import ZeroEngine


@dataclass
class Held:
    """What was found in the last update; None before there was one."""

    found: HeldBytes | None = None

    @property
    def bytes(self) -> HeldBytes:
        """What was found."""
        assert self.found is not None, "no update ran while bytes were measured"
        return self.found


@contextmanager
def measure_held(engine: Engine) -> Iterator[Held]:
    """Measure in every update meanwhile; the last one counts.

    The first update of a run is not typical: buffers and moments are made in it.
    """
    held = Held()
    update = engine.update

    def measuring(*, lr: float, max_grad_norm: float) -> Update:
        parameters = Storages(parameters_of(engine))
        states = Storages(optimizer_tensors_of(engine), but=[parameters])
        gradients = Storages(gradients_of(engine), but=[parameters, states])
        result = update(lr=lr, max_grad_norm=max_grad_norm)
        # Counted after it, for the first update makes the moments.
        optimizer = Storages(optimizer_tensors_of(engine), but=[parameters])
        held.found = HeldBytes(
            parameters=parameters.num_bytes,
            gradients=gradients.num_bytes,
            optimizer=optimizer.num_bytes,
        )
        return result

    engine.update = measuring  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield held
    finally:
        engine.update = update  # pyright: ignore[reportAttributeAccessIssue]


class Storages:
    """The distinct storages of tensors, held so that none is freed while they are counted."""

    def __init__(self, tensors: Iterable[torch.Tensor], *, but: Sequence[Storages] = ()) -> None:
        known = {0, *(pointer for others in but for pointer in others.by_pointer)}
        self.by_pointer: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = _local(tensor).untyped_storage()
            # An empty storage, and one on the meta device, is nowhere.
            if storage.nbytes() and storage.data_ptr() not in known:
                self.by_pointer[storage.data_ptr()] = storage

    @property
    def num_bytes(self) -> int:
        """Add them up."""
        return sum(storage.nbytes() for storage in self.by_pointer.values())


def parameters_of(engine: Engine) -> Iterator[torch.Tensor]:
    """Yield what this rank has of every weight: whole, or its part of it."""
    for parameter in engine.module.parameters():
        yield parameter
        if isinstance(part := getattr(parameter, "ds_tensor", None), torch.Tensor):
            yield part
    for name in ("bf16_partitioned_groups", "param_buffer_of_bit16_for_cpu_offload_groups"):
        yield from _reachable(getattr(_deepspeed(engine), name, ()))
    if isinstance(engine, ZeroEngine):
        yield from engine._tensors._frozen.rows.values()


def gradients_of(engine: Engine) -> Iterator[torch.Tensor]:
    """Yield what this rank has of every gradient before the update.

    Buckets are among it, and what DDP's hooks keep from step to step (PowerSGD). Of DeepSpeed's
    optimizer it is all that is neither weights nor the optimizer's state.
    """
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            yield parameter.grad
    module = engine.module
    if isinstance(module, DistributedDataParallel):
        if not module.gradient_as_bucket_view:
            # The reducer shows no bucket of its own, but makes others of the same sizes.
            for bucket in module.reducer._get_zeros_like_grad_buckets():
                yield bucket.buffer()
        for _, state in module._comm_hooks:
            if isinstance(state, PowerSGDState):
                for kept in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                    yield from kept.values()
    # It also has flags, numbers of one element.
    yield from (each for each in _reachable(_deepspeed(engine)) if each.numel() > 1)


def optimizer_tensors_of(engine: Engine) -> Iterator[torch.Tensor]:
    """Yield moments, counters, and weights that the optimizer alone has."""
    for group in engine.optimizer.param_groups:
        yield from group["params"]
    for state in engine.optimizer.state.values():
        for each in state.values():
            if isinstance(each, torch.Tensor):
                yield from tensors_in(each).values()
                # The table of values of a state of eight bits; each has its own.
                if isinstance(table := getattr(each, "qmap", None), torch.Tensor):
                    yield table
    for name in ("fp32_partitioned_groups_flat", "fp32_groups_flat_partition"):
        yield from getattr(_deepspeed(engine), name, ())


def _deepspeed(engine: Engine) -> Any:
    """Return the optimizer that DeepSpeed has put around ours, None where it has not."""
    found = getattr(engine.module, "optimizer", None)
    return found if type(found).__module__.startswith("deepspeed.") else None


def _reachable(root: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that DeepSpeed's objects hold, however deep."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, torch.Tensor):
            yield found
            waiting.extend(vars(found).values())
            if found.is_leaf and found.grad is not None:
                waiting.append(found.grad)
        elif isinstance(found, dict):
            waiting.extend(found.keys())
            waiting.extend(found.values())
        elif isinstance(found, list | tuple | set):
            waiting.extend(found)
        elif type(found).__module__.startswith("deepspeed.") and not isinstance(
            found, nn.Module | type
        ):
            waiting.extend(getattr(found, "__dict__", {}).values())


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
