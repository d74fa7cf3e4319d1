"""The least time that a step can take: layout and workload in, seconds out.

A floor, not a forecast: peak rates, no padding, communication hidden behind computing wherever it
can be. Where the device's rate is not known there is no number.
"""

from __future__ import annotations

import math

from diptych.core.records import Cluster, Device, Layout, ModelShape
from diptych.plan.sent import sent_bytes
from diptych.plan.states import States
from diptych.shape.counts import BatchCounts
from diptych.shape.flops import train_flops

_ADAMW = States()


def step_floor_s(
    model_shape: ModelShape,
    *,
    layout: Layout,
    cluster: Cluster,
    counts: BatchCounts,
    num_micro_batches: int,
    states: States = _ADAMW,
) -> float | None:
    """Return the least seconds of one step, None where the device's FLOP/s are unknown.

    Args:
        model_shape: the model.
        layout: how it is spread.
        cluster: the devices' rates.
        counts: what the busiest rank computes in one step.
        num_micro_batches: of one step.
        states: what an update reads and writes beside the weights.
    """
    rate = peak_flops_per_s(cluster.device, layout=layout)
    if rate is None:
        return None
    compute_s = train_flops(model_shape, counts=counts) / rate
    link = cluster.link_bytes_per_s
    sent = sent_bytes(model_shape, layout=layout, num_micro_batches=num_micro_batches)
    communicate_s = sent / link if link else 0.0
    bandwidth = cluster.device.memory_bytes_per_s
    # States in the host's memory are updated there, at a rate that is not known.
    is_on_device = not layout.fsdp.offload and layout.zero.optimizer.to == "device"
    moved = states.moved_bytes(model_shape) / (1 if layout.engine == "ddp" else layout.shard)
    update_s = moved / bandwidth if bandwidth and is_on_device else 0.0
    return max(compute_s, communicate_s) + update_s


def peak_flops_per_s(device: Device, *, layout: Layout) -> float | None:
    """Return the fastest of the rates that a layout uses; None where one is not known."""
    used = {layout.precision, *layout.mixed_precision.towers.values()}
    rates = []
    for precision in used:
        rate = device.flops_per_s.get(precision)
        if rate is None and precision == "fp16":
            rate = device.flops_per_s.get("bf16")
        rates.append(rate)
    if layout.mixed_precision.fp8:
        # Tensor cores multiply eight bits at twice the rate of sixteen.
        rates.append(2 * max((rate for rate in rates if rate), default=math.nan))
    return None if None in rates else max(rates)
