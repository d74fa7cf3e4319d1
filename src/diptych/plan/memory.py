"""Bytes that a rank holds: a model_shape, a layout and a micro-batch in, bytes out.

What is held throughout a run is exact, rank by rank, with each engine's padding. Training in fp32,
and in bf16 or fp16 with fp32 weights, holds 16 bytes a parameter: weight 4, gradient 4, Adam's two
moments 8. Muon has one moment, and the weights' mean is 4 more. What comes and goes within a step
is an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

from diptych.core.records import HeldBytes, Layout, ModelShape, Parameter
from diptych.plan.replicas import kept_bytes
from diptych.plan.sharding import (
    DTYPE_BYTES,
    local_elements,
    padded_elements,
    shard_groups,
)
from diptych.plan.states import States
from diptych.plan.zero import zero_bytes, zero_held_bytes, zero_passing_bytes
from diptych.shape.activations import activation_bytes
from diptych.shape.counts import BatchCounts

_WEIGHT_BYTES = 4
_ADAMW = States()

PROCESS_BYTES = {"cpu": 850_000_000, "cuda": 1_500_000_000}
"""What a rank costs before it holds a tensor: torch and its libraries; on a GPU the context and
the communicator's buffers. Measured for a CPU with torch 2.14; for a GPU a cautious guess."""


def held_bytes(
    model_shape: ModelShape,
    *,
    layout: Layout,
    rank: int = 0,
    num_micro_batches: int = 1,
    states: States = _ADAMW,
) -> HeldBytes:
    """Return the bytes of weights, gradients and optimizer state that a rank holds throughout.

    Gradients count as they are between the last backward pass and the update, with the buffers
    that stay.

    Args:
        model_shape: the model.
        layout: how it is spread.
        rank: which one.
        num_micro_batches: of one step.
        states: what is kept beside the weights.
    """
    if layout.engine == "zero":
        return zero_held_bytes(
            model_shape,
            layout=layout,
            rank=rank,
            num_micro_batches=num_micro_batches,
            states=states,
        )
    if layout.engine == "fsdp2":
        return _held_sharded(model_shape, layout=layout, index=rank % layout.shard, states=states)
    return _held_whole(model_shape, layout=layout, states=states)


def host_bytes(
    model_shape: ModelShape,
    *,
    layout: Layout,
    counts: BatchCounts,
    num_micro_batches: int,
    states: States = _ADAMW,
) -> int:
    """Return what a rank keeps in the host's memory beside a GPU's: states and activations.

    Ranks on a CPU have one memory for all, so nothing lies beside it.
    """
    held = _held_on_host(
        model_shape, layout=layout, num_micro_batches=num_micro_batches, states=states
    )
    if layout.device == "cpu" or not layout.memory.offload_activations:
        return held
    return held + math.ceil(_activation_bytes(model_shape, layout=layout, counts=counts, stay=True))


def peak_bytes(
    model_shape: ModelShape,
    *,
    layout: Layout,
    counts: BatchCounts,
    num_micro_batches: int,
    states: States = _ADAMW,
) -> int:
    """Return the most that a rank holds at once on its device.

    Args:
        model_shape: the model.
        layout: how it is spread.
        counts: the heaviest micro-batch.
        num_micro_batches: of one step; gradients of more than one may have to wait unsharded.
        states: what is kept beside the weights.
    """
    micro_batches = {"num_micro_batches": num_micro_batches}
    # Offloaded from a CPU, activations go to the memory that they are in already.
    stay = layout.device == "cpu" or not layout.memory.offload_activations
    return math.ceil(
        held_bytes(model_shape, layout=layout, states=states, **micro_batches).total
        - _held_on_host(model_shape, layout=layout, states=states, **micro_batches)
        + gathered_bytes(model_shape, layout=layout, **micro_batches)
        + _activation_bytes(model_shape, layout=layout, counts=counts, stay=stay)
        + PROCESS_BYTES[layout.device]
    )


def gathered_bytes(model_shape: ModelShape, *, layout: Layout, num_micro_batches: int) -> int:
    """Return the bytes that come and go beside the states, activations aside.

    `ddp` in bf16 or fp16 keeps a copy of the weights through a micro-batch, and gradients that wait
    for the step's last micro-batch lie beside the buckets until then. `fsdp2` gathers the root for
    a whole micro-batch and some blocks at a time (those that are fetched ahead), or all of them,
    with a block's whole gradients before they are reduced; gradients that wait for the last
    micro-batch wait whole.
    """
    if layout.engine == "zero":
        return zero_passing_bytes(model_shape, layout=layout, num_micro_batches=num_micro_batches)
    waits = num_micro_batches > 1 and layout.grad_sync == "last"
    num_trained = _elements(model_shape.trained)
    if layout.engine == "fsdp2":
        waiting = DTYPE_BYTES[layout.mixed_precision.reduce] * num_trained if waits else 0
        return _gathered_sharded(model_shape, layout=layout) + waiting
    copies = 0 if layout.precision == "fp32" else 2 * model_shape.num_parameters
    beside_buckets = waits and layout.dp > 1 and layout.ddp.gradient_as_bucket_view
    return copies + (_WEIGHT_BYTES * num_trained if beside_buckets else 0)


def _held_on_host(
    model_shape: ModelShape, *, layout: Layout, num_micro_batches: int, states: States
) -> int:
    """Return what of the held bytes is offloaded from a GPU."""
    if layout.device == "cpu":
        return 0
    if layout.engine == "zero":
        return zero_bytes(
            model_shape, layout=layout, num_micro_batches=num_micro_batches, states=states
        ).host.total
    is_offloaded = layout.engine == "fsdp2" and layout.fsdp.offload
    return held_bytes(model_shape, layout=layout, states=states).total if is_offloaded else 0


def _activation_bytes(
    model_shape: ModelShape, *, layout: Layout, counts: BatchCounts, stay: bool
) -> float:
    """Estimate activations at their peak, all of them or what is not offloaded at that moment."""
    return activation_bytes(
        model_shape,
        counts=counts,
        precision=layout.precision,
        memory=layout.memory.model_copy(update={"offload_activations": not stay}),
    )


def _gathered_sharded(model_shape: ModelShape, *, layout: Layout) -> int:
    """Count whole weights and whole gradients at their most."""
    groups = shard_groups(model_shape, layout=layout)
    sizes = [(group, group.copy_bytes * _elements(group.parameters)) for group in groups]
    stay = sum(size for group, size in sizes if group.stays)
    passing = sorted(size for group, size in sizes if not group.stays)
    ahead = max(1, layout.fsdp.prefetch_forward, layout.fsdp.prefetch_backward)
    root = sum(_elements(group.trained) for group in groups if group.is_root)
    block = max((_elements(group.trained) for group in groups if not group.is_root), default=0)
    gradients = DTYPE_BYTES[layout.mixed_precision.reduce] * (root + block)
    return stay + sum(passing[-(1 + ahead) :]) + gradients


def _held_whole(model_shape: ModelShape, *, layout: Layout, states: States) -> HeldBytes:
    """Count one process, and `ddp`: everything on every rank.

    DDP's buckets are the gradients, unless `gradient_as_bucket_view` is off: then they are as large
    again. What compression keeps counts as gradients.
    """
    trained = model_shape.trained
    num_trained = _elements(trained)
    has_buckets = layout.dp > 1 and not layout.ddp.gradient_as_bucket_view
    return HeldBytes(
        parameters=_WEIGHT_BYTES * model_shape.num_parameters,
        gradients=_WEIGHT_BYTES * num_trained * (2 if has_buckets else 1)
        + kept_bytes(trained, layout=layout),
        optimizer=states.held_bytes(model_shape, num_local=lambda each: each.num_elements),
    )


def _held_sharded(
    model_shape: ModelShape, *, layout: Layout, index: int, states: States
) -> HeldBytes:
    """Count `fsdp2`: weights and gradients are padded, moments are not."""
    num_shards, trained = layout.shard, model_shape.trained

    def padded(parameters: Iterable[Parameter]) -> int:
        return sum(padded_elements(each, num_shards=num_shards) for each in parameters)

    num_local = partial(local_elements, num_shards=num_shards, index=index)
    return HeldBytes(
        parameters=_WEIGHT_BYTES * padded(model_shape.parameters),
        gradients=_WEIGHT_BYTES * padded(trained),
        optimizer=states.held_bytes(model_shape, num_local=num_local),
    )


def _elements(parameters: Iterable[Parameter]) -> int:
    return sum(parameter.num_elements for parameter in parameters)
