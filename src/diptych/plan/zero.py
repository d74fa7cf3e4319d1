"""Bytes that a rank holds under DeepSpeed's ZeRO: a model_shape and a layout in, bytes out.

Stages 1 and 2 lay the trained weights of each of the optimizer's groups end to end, pad them to a
multiple of twice the number of ranks, and cut that into equal partitions, wherever a parameter
ends. Stage 3 cuts every parameter by itself, trained or not, and pads the last part.

`parameters` are the weights that forward passes read, frozen ones and copies of small ones too.
`optimizer` is the fp32 weights (a copy in fp32 too), AdamW's moments and counters. `gradients` are
counted between the last backward pass and the update, with buckets that stay. Sizes in memory are
exact; those of buffers around an NVMe disk are estimates.

Source: `stage_1_and_2.py`, `stage3.py` and `bf16_optimizer.py` of DeepSpeed 0.19.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from diptych.core.records import HeldBytes, Layout, ModelShape, Parameter
from diptych.plan.sharding import DTYPE_BYTES, local_elements
from diptych.plan.states import States

_MASTER_BYTES = 12
"""Of an element in the optimizer: fp32 weight and AdamW's two moments."""
_ADAMW = States()
_COUNTER_BYTES = 4
_SUB_GROUP_ELEMENTS = 1_000_000_000
"""DeepSpeed's default; stage 3 updates so many elements at a time."""
_NOTHING = HeldBytes(parameters=0, gradients=0, optimizer=0)


@dataclass(frozen=True)
class ZeroBytes:
    """What one rank holds on its device, in the host's memory, and on an NVMe disk."""

    device: HeldBytes
    host: HeldBytes
    disk: int


@dataclass(frozen=True)
class _Group:
    """A group of the optimizer, as stages 1 and 2 partition it.

    Attributes:
        parameters: in the model's order.
        partition: elements of every rank's part, padding included.
        own: parameters that reach into this rank's part.
        padding: elements at the end of this rank's part that belong to no parameter.
    """

    parameters: tuple[Parameter, ...]
    partition: int
    own: tuple[Parameter, ...]
    padding: int


def zero_held_bytes(
    model_shape: ModelShape,
    *,
    layout: Layout,
    rank: int = 0,
    num_micro_batches: int = 1,
    states: States = _ADAMW,
) -> HeldBytes:
    """Return what a rank holds in memory throughout a run, on its device and its host together."""
    found = zero_bytes(
        model_shape, layout=layout, rank=rank, num_micro_batches=num_micro_batches, states=states
    )
    return _add(found.device, found.host)


def zero_bytes(
    model_shape: ModelShape,
    *,
    layout: Layout,
    rank: int = 0,
    num_micro_batches: int = 1,
    states: States = _ADAMW,
) -> ZeroBytes:
    """Return what a rank holds throughout a run, by place.

    Args:
        model_shape: the model.
        layout: its engine is `zero`.
        rank: among those that share the states.
        num_micro_batches: of one step; offloaded gradients of several add up in the host's memory.
        states: what is kept beside the weights.
    """
    if layout.zero.stage == 3:
        found = _sharded(model_shape, layout=layout, states=states)
    else:
        groups = _groups(model_shape, states=states, num_ranks=layout.shard, rank=rank)
        found = _flat(
            model_shape,
            layout=layout,
            groups=groups,
            master_bytes=_MASTER_BYTES + states.mean_bytes,
            accumulates=num_micro_batches > 1,
        )
    if layout.precision == "fp32":
        return found
    trained = {each.name for each in model_shape.trained}
    rows = sum(
        local_elements(each, num_shards=layout.shard, index=rank)
        for each in model_shape.parameters
        if each.name not in trained
    )
    kept = _NOTHING.model_copy(update={"parameters": 4 * rows})
    return ZeroBytes(found.device, _add(found.host, kept), found.disk)


def zero_passing_bytes(model_shape: ModelShape, *, layout: Layout, num_micro_batches: int) -> int:
    """Estimate what comes and goes on the device beside what is held, activations aside.

    Stages 1 and 2: buckets, and whole gradients: of every micro-batch until the last one (1), or of
    a bucket (2). Stage 3: gathered weights. Then the update's flat copy of gradients.
    """
    options = layout.zero
    weight = DTYPE_BYTES[layout.precision]
    num_trained = _elements(model_shape.trained)
    bucket = min(options.reduce_bucket_elements, num_trained)
    if options.stage == 3:
        live = options.max_live_elements + options.prefetch_elements
        largest = max(_elements([each]) for each in model_shape.parameters)
        gathered = max(largest, min(live, model_shape.num_parameters))
        return weight * (gathered + bucket) + 4 * -(-num_trained // layout.shard)
    buckets = bucket * (2 if options.overlap else 1) if options.contiguous_gradients else 0
    whole = num_trained if options.stage == 1 else bucket
    waits = 4 if options.stage == 1 and num_micro_batches > 1 else weight
    return weight * buckets + waits * whole + 4 * -(-num_trained // layout.shard)


def _flat(
    model_shape: ModelShape,
    *,
    layout: Layout,
    groups: list[_Group],
    master_bytes: int,
    accumulates: bool,
) -> ZeroBytes:
    """Count stages 1 and 2."""
    weight = DTYPE_BYTES[layout.precision]
    partition = sum(group.partition for group in groups)
    frozen = model_shape.num_parameters - _elements(model_shape.trained)
    optimizer = master_bytes * partition + _counters(layout, num=len(groups))
    parameters = weight * (partition * layout.shard + frozen)
    gradients = _flat_gradients(groups, layout=layout)
    if layout.zero.optimizer.to == "device":
        device = HeldBytes(parameters=parameters, gradients=gradients, optimizer=optimizer)
        return ZeroBytes(device, _NOTHING, 0)
    # One buffer on each side through which a parameter's gradient passes.
    passing = weight * max(_elements([each]) for each in model_shape.trained)
    waiting = layout.precision == "fp32" and layout.zero.stage == 2 and accumulates
    own = sum(_elements(group.own) for group in groups)
    host = HeldBytes(
        parameters=weight * partition,
        gradients=4 * partition + passing + (weight * own if waiting else 0),
        optimizer=optimizer,
    )
    device = HeldBytes(parameters=parameters, gradients=gradients + passing, optimizer=0)
    return ZeroBytes(device, host, 0)


def _flat_gradients(groups: list[_Group], *, layout: Layout) -> int:
    """Count gradients on the device, before the update of stages 1 and 2.

    In fp32 those of a rank's parameters lie there whole. In lower precision they add up in fp32, in
    the partition; stage 1 still has those that it reduced for others: whole in bf16, where another
    class of DeepSpeed does the work, else in the bucket.
    """
    options = layout.zero
    offloads = options.optimizer.to != "device"
    partition = sum(group.partition for group in groups)
    if layout.precision == "fp32":
        whole = sum(_elements(group.own) + group.padding for group in groups)
        return 0 if offloads else 4 * whole
    if options.stage == 2:
        return 4 * partition
    if layout.precision == "bf16" and not offloads:
        return 4 * partition * layout.shard
    if not (options.contiguous_gradients or offloads):
        return 4 * (partition + sum(_elements(group.parameters) for group in groups))
    return 4 * (
        partition + _reduced_for_others(groups, bucket_elements=options.reduce_bucket_elements)
    )


def _reduced_for_others(groups: list[_Group], *, bucket_elements: int) -> int:
    """Count gradients that lie in the bucket, or beside it, after they were sent."""
    everyone = [each for group in groups for each in group.parameters]
    own = {each.name for group in groups for each in group.own}
    others = [_elements([each]) for each in everyone if each.name not in own]
    bucket = min(bucket_elements, _elements(everyone))
    beside = sum(size for size in others if size > bucket)
    return beside + (bucket if min(others, default=bucket + 1) <= bucket else 0)


def _sharded(model_shape: ModelShape, *, layout: Layout, states: States) -> ZeroBytes:
    """Count stage 3; every rank holds as much, padding included."""
    options, num_ranks = layout.zero, layout.shard
    weight = DTYPE_BYTES[layout.precision]
    cut = sum(_part(each, num_ranks=num_ranks) for each in model_shape.parameters)
    trained = sum(_part(each, num_ranks=num_ranks) for each in model_shape.trained)
    stays = options.parameters.to == "device"
    small = [
        num_ranks * _part(each, num_ranks=num_ranks)
        for each in model_shape.parameters
        if _elements([each]) <= options.persistence_threshold_elements
    ]
    # One rank's part is the whole, and no copy of it is made.
    persistent = 0 if num_ranks == 1 and stays else sum(small)
    bucket = min(options.reduce_bucket_elements, _elements(model_shape.trained))
    reduce = DTYPE_BYTES[layout.mixed_precision.reduce]
    buckets = reduce * bucket if options.contiguous_gradients else 0
    num_flat = _num_sub_groups(model_shape, states=states, num_ranks=num_ranks)
    optimizer = (_MASTER_BYTES + states.mean_bytes) * trained + _counters(layout, num=num_flat)
    offloads = options.optimizer.to != "device"
    device = HeldBytes(
        parameters=weight * (persistent + (cut if stays else 0)),
        gradients=buckets + (0 if offloads else 4 * trained),
        optimizer=0 if offloads else optimizer,
    )
    host = HeldBytes(
        parameters=_host_weights(layout, num_elements=cut),
        gradients=_host_gradients(layout, num_elements=trained),
        optimizer=optimizer if options.optimizer.to == "cpu" else 0,
    )
    disk = 16 * trained if options.optimizer.to == "nvme" else 0
    disk += weight * cut if options.parameters.to == "nvme" else 0
    return ZeroBytes(device, host, disk)


def _host_weights(layout: Layout, *, num_elements: int) -> int:
    """Count weights in the host's memory: all, or as many as may stay and the disk's buffers."""
    offload, weight = layout.zero.parameters, DTYPE_BYTES[layout.precision]
    if offload.to == "nvme":
        buffers = offload.buffer_count * offload.buffer_size
        return weight * (min(offload.max_in_cpu, num_elements) + buffers)
    return weight * num_elements if offload.to == "cpu" else 0


def _host_gradients(layout: Layout, *, num_elements: int) -> int:
    """Count gradients in the host's memory: added up, and beside the weights they update."""
    offload = layout.zero.optimizer
    if offload.to == "nvme":
        tile = min(num_elements, _SUB_GROUP_ELEMENTS)
        return 4 * (num_elements + offload.buffer_count * tile)
    return 8 * num_elements if offload.to == "cpu" else 0


def _groups(model_shape: ModelShape, *, states: States, num_ranks: int, rank: int) -> list[_Group]:
    """Partition the optimizer's groups."""
    found = []
    for group in states.groups(model_shape):
        parameters = group.parameters
        alignment = 2 * num_ranks
        num_elements = _elements(parameters)
        partition = -(-num_elements // alignment) * 2
        start, end = rank * partition, (rank + 1) * partition
        own, position = [], 0
        for each in parameters:
            size = _elements([each])
            if position < end and position + size > start:
                own.append(each)
            position += size
        padding = end - max(start, min(end, num_elements))
        found.append(_Group(parameters, partition, tuple(own), padding))
    return found


def _num_sub_groups(model_shape: ModelShape, *, states: States, num_ranks: int) -> int:
    """Count the flat tensors that stage 3 updates one after another."""
    count = 0
    for group in states.groups(model_shape):
        sizes = [_part(each, num_ranks=num_ranks) for each in group.parameters]
        if sum(sizes) <= _SUB_GROUP_ELEMENTS:
            count += 1
            continue
        filled = 0
        for number, size in enumerate(sizes, start=1):
            filled += size
            if filled >= _SUB_GROUP_ELEMENTS or number == len(sizes):
                count, filled = count + 1, 0
    return count


def _counters(layout: Layout, *, num: int) -> int:
    """Count torch's step counters, a tensor each; DeepSpeed's AdamW counts in Python."""
    offload = layout.zero.optimizer
    own = offload.to != "device" and offload.adam == "deepspeed"
    return 0 if own else _COUNTER_BYTES * num


def _part(parameter: Parameter, *, num_ranks: int) -> int:
    return -(-_elements([parameter]) // num_ranks)


def _elements(parameters: Iterable[Parameter]) -> int:
    return sum(math.prod(parameter.shape) for parameter in parameters)


def _add(left: HeldBytes, right: HeldBytes) -> HeldBytes:
    return HeldBytes(
        parameters=left.parameters + right.parameters,
        gradients=left.gradients + right.gradients,
        optimizer=left.optimizer + right.optimizer,
    )
