"""Bytes that a rank sends in a step: a model_shape and a layout in, bytes out.

Ring algorithms: an all-reduce of n bytes over r ranks sends 2 (r - 1) / r n, an all-gather or a
reduce-scatter half of that. Counted is a step of a run that is under way: PowerSGD and local SGD
have begun. Norms, flags and the loop's own numbers, a few bytes a step, are left out, and so is
what local SGD averages within a node.
"""

from __future__ import annotations

import math

from diptych.core.records import Layout, ModelShape
from diptych.plan.replicas import gradient_bytes
from diptych.plan.sent_zero import zero_sent_bytes
from diptych.plan.sharding import DTYPE_BYTES, ShardGroup, padded_elements, shard_groups


def sent_bytes(model_shape: ModelShape, *, layout: Layout, num_micro_batches: int) -> float:
    """Return the bytes that a rank sends in one step.

    Args:
        model_shape: the model; what is frozen sends no gradients.
        layout: how it is spread.
        num_micro_batches: of one step.
    """
    num_reduces = num_micro_batches if layout.grad_sync == "every" else 1
    if layout.engine == "ddp":
        return _replicated(model_shape, layout=layout, num_reduces=num_reduces)
    if layout.engine == "zero":
        return zero_sent_bytes(model_shape, layout=layout, num_micro_batches=num_micro_batches)
    return sum(
        (num_micro_batches * group.num_gathers + group.num_strays) * _gathered(group, layout=layout)
        + num_reduces * _reduced(group, layout=layout)
        for group in shard_groups(model_shape, layout=layout)
    )


def _replicated(model_shape: ModelShape, *, layout: Layout, num_reduces: int) -> float:
    """Count `ddp`: all gradients in every reduction, or all weights once in a period."""
    trained = model_shape.trained
    period = layout.ddp.local_sgd_period
    if period is None:
        carried = num_reduces * gradient_bytes(trained, layout=layout)
    else:
        carried = 4 * sum(math.prod(each.shape) for each in trained) / period
    return 2 * _ring(layout.dp) * carried


def _gathered(group: ShardGroup, *, layout: Layout) -> float:
    """Count one gather of a group."""
    num_elements = sum(padded_elements(each, num_shards=layout.shard) for each in group.parameters)
    return _ring(layout.shard) * layout.shard * num_elements * group.copy_bytes


def _reduced(group: ShardGroup, *, layout: Layout) -> float:
    """Count a group's reduction: within the shards, then what each keeps between the copies."""
    num_elements = sum(padded_elements(each, num_shards=layout.shard) for each in group.trained)
    kept = num_elements * DTYPE_BYTES[layout.mixed_precision.reduce]
    return _ring(layout.shard) * layout.shard * kept + 2 * _ring(layout.dp) * kept


def _ring(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks
