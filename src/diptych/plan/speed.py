"""The least time that a step can take: layout and workload in, seconds out.

A floor, not a forecast: peak rates, no padding, communication hidden behind computing wherever it
can be. Where the device's rate is not known there is no number.
"""

from __future__ import annotations

from diptych.core.records import Cluster, Layout, ModelShape
from diptych.shape.families import family
from diptych.shape.flops import BatchCounts

ADAM_BYTES = 28
"""Moved per parameter by a fused AdamW step: weight and moments read and written, gradient read."""


def step_floor_s(
    model_shape: ModelShape,
    *,
    layout: Layout,
    cluster: Cluster,
    counts: BatchCounts,
    num_micro_batches: int,
) -> float | None:
    """Return the least seconds of one step, None where the device's FLOP/s are unknown.

    Args:
        model_shape: the model.
        layout: how it is spread.
        cluster: the devices' rates.
        counts: what the busiest rank computes in one step.
        num_micro_batches: of one step.
    """
    rate = cluster.device.flops_per_s.get(layout.precision)
    if rate is None:
        return None
    flops = family(model_shape.family).train_flops(model_shape.sizes, counts=counts)
    compute_s = flops / rate
    link = cluster.link_bytes_per_s
    sent = sent_bytes(model_shape, layout=layout, num_micro_batches=num_micro_batches)
    communicate_s = sent / link if link else 0.0
    bandwidth = cluster.device.memory_bytes_per_s
    num_updated = model_shape.num_parameters / (layout.shard if layout.engine == "fsdp2" else 1)
    update_s = ADAM_BYTES * num_updated / bandwidth if bandwidth else 0.0
    return max(compute_s, communicate_s) + update_s


def sent_bytes(model_shape: ModelShape, *, layout: Layout, num_micro_batches: int) -> float:
    """Return the bytes that a rank sends in one step, by ring algorithms.

    An all-reduce of n bytes over r ranks sends 2 (r - 1) / r n, an all-gather or a reduce-scatter
    half of that. `fsdp2` gathers weights before forward and again before backward.
    """
    num_parameters = model_shape.num_parameters
    if layout.engine == "ddp":
        return 2 * _ring(layout.dp) * 4 * num_parameters
    copy_bytes = 2 if layout.precision == "bf16" else 4
    num_reduces = num_micro_batches if layout.grad_sync == "every" else 1
    gathers = 2 * num_micro_batches * copy_bytes * num_parameters
    scatters = num_reduces * 4 * num_parameters
    between_copies = 2 * _ring(layout.dp) * num_reduces * 4 * num_parameters / layout.shard
    return _ring(layout.shard) * (gathers + scatters) + between_copies


def _ring(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks
