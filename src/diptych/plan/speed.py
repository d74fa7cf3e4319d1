"""The least time that a step can take: layout and workload in, seconds out.

A floor, not a forecast: peak rates, no padding, communication hidden behind computing wherever it
can be. Where the device's rate is not known there is no number.
"""

from __future__ import annotations

import math
from dataclasses import replace

from diptych.core.records import Cluster, Device, Layout, ModelShape
from diptych.plan.sent import sent_bytes
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
    rate = _flops_per_s(cluster.device, layout=layout)
    if rate is None:
        return None
    compute_s = train_flops(model_shape, counts=counts) / rate
    link = cluster.link_bytes_per_s
    sent = sent_bytes(model_shape, layout=layout, num_micro_batches=num_micro_batches)
    communicate_s = sent / link if link else 0.0
    bandwidth = cluster.device.memory_bytes_per_s
    # States in the host's memory are updated there, at a rate that is not known.
    is_on_device = not layout.fsdp.offload and layout.zero.optimizer.to == "device"
    num_trained = sum(math.prod(each.shape) for each in model_shape.trained)
    num_updated = num_trained / (1 if layout.engine == "ddp" else layout.shard)
    update_s = ADAM_BYTES * num_updated / bandwidth if bandwidth and is_on_device else 0.0
    return max(compute_s, communicate_s) + update_s


def train_flops(model_shape: ModelShape, *, counts: BatchCounts) -> float:
    """Count the matrix multiplications of forward and backward, without recomputing.

    A trained tower costs three times its forward pass. A frozen one computes no gradient of its
    weights: twice, where gradients pass through it, once where nothing before it trains.
    """
    known, frozen = family(model_shape.family), model_shape.frozen
    if not frozen:
        return known.train_flops(model_shape.sizes, counts=counts)
    whole = known.forward_flops(model_shape.sizes, counts=counts)
    vision = known.forward_flops(
        model_shape.sizes,
        counts=replace(counts, num_tokens=0, squared_tokens=0, num_head_tokens=0),
    )
    # Nothing asks for the pixels' gradient.
    pixels = 3 * whole.total - known.train_flops(model_shape.sizes, counts=counts)
    # The connector is counted with the vision tower, of which it is a small part.
    sees = "vision" not in frozen
    reads = "language" not in frozen
    passed = sees or "connector" not in frozen
    taught = passed or reads
    head_trains = reads if model_shape.tied_parameters else "head" not in frozen
    return (
        _passes(trains=sees, passed=sees) * (vision.vision + vision.attention)
        - (pixels if sees else 0)
        + _passes(trains=reads, passed=passed) * whole.language
        # Attention has no weights: its backward pass costs twice its forward pass, or nothing.
        + (3 if taught else 1) * (whole.attention - vision.attention)
        + _passes(trains=head_trains, passed=taught) * whole.head
    )


def _passes(*, trains: bool, passed: bool) -> int:
    """Count a tower's forward passes' worth: forward, its weights' gradient, its input's."""
    return 1 + int(trains) + int(trains or passed)


def _flops_per_s(device: Device, *, layout: Layout) -> float | None:
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
