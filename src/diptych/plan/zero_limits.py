"""Why DeepSpeed's ZeRO cannot run as asked: a layout in, a reason or None out."""

from __future__ import annotations

import math

from diptych.core.records import Layout, ModelShape, OptimizerOffload, ParameterOffload

_STATES_ON_DISK = 4
"""Of each flat tensor: the weight, its gradient, and AdamW's two moments."""


def refusal(layout: Layout, *, model_shape: ModelShape | None = None) -> str | None:
    """Return the first reason, None if there is none or another engine runs.

    Args:
        layout: what is asked for.
        model_shape: the model; without it, sizes are not compared with its parameters.
    """
    if layout.engine != "zero":
        return None
    return (
        _copies(layout)
        or _grad_sync(layout)
        or _bucket(layout)
        or _stage(layout)
        or _paths(layout)
        or _buffers(layout, model_shape=model_shape)
    )


def _copies(layout: Layout) -> str | None:
    if layout.dp == 1:
        return None
    return (
        f"zero shards over all ranks, and dp is {layout.dp}; copies of shards are built for "
        "engine fsdp2: use it, or leave plan.layout.replicas at auto"
    )


def _grad_sync(layout: Layout) -> str | None:
    if layout.grad_sync == "every" and layout.zero.stage == 1:
        return (
            "grad_sync is every, and ZeRO 1 reduces gradients once a step; set grad_sync to auto, "
            "or take zero.stage 2 or 3, which reduce those of every micro-batch"
        )
    return None


def _bucket(layout: Layout) -> str | None:
    size = layout.zero.allgather_bucket_elements
    if size % 2:
        return (
            f"zero.allgather_bucket_elements is {size}, and DeepSpeed takes even numbers only; "
            f"set it to {size + 1}"
        )
    return None


def _stage(layout: Layout) -> str | None:
    options = layout.zero
    if options.stage == 3:
        return None
    if options.parameters.to != "device":
        return (
            f"zero.parameters.to is {options.parameters.to}, and stage {options.stage} keeps the "
            "weights whole on every rank; set zero.stage to 3, or zero.parameters.to to device"
        )
    if options.optimizer.to == "nvme":
        return (
            f"zero.optimizer.to is nvme, and stage {options.stage} offloads to the host's memory "
            "at most; set zero.stage to 3, or zero.optimizer.to to cpu"
        )
    return None


def _paths(layout: Layout) -> str | None:
    offloads: dict[str, OptimizerOffload | ParameterOffload] = {
        "optimizer": layout.zero.optimizer,
        "parameters": layout.zero.parameters,
    }
    for name, offload in offloads.items():
        if offload.to == "nvme" and not offload.path:
            return (
                f"zero.{name}.to is nvme, and no disk is named; set zero.{name}.path to a folder "
                "on it"
            )
        if offload.to != "nvme" and offload.path:
            return (
                f"zero.{name}.path is {offload.path}, and states go to the {offload.to}; set "
                f"zero.{name}.to to nvme, or the path to null"
            )
    return None


def _buffers(layout: Layout, *, model_shape: ModelShape | None) -> str | None:
    """Refuse buffers around an NVMe disk that are too few or too small."""
    optimizer, parameters = layout.zero.optimizer, layout.zero.parameters
    if optimizer.to == "nvme" and optimizer.buffer_count < _STATES_ON_DISK:
        return (
            f"zero.optimizer.buffer_count is {optimizer.buffer_count}, and weight, gradient and "
            f"two moments take a buffer each; set it to {_STATES_ON_DISK} or more"
        )
    if parameters.to == "nvme" and model_shape is not None:
        largest = max(model_shape.parameters, key=lambda each: math.prod(each.shape))
        part = -(-math.prod(largest.shape) // layout.shard)
        if part > parameters.buffer_size:
            return (
                f"zero.parameters.buffer_size is {parameters.buffer_size}, and a rank's part of "
                f"{largest.name} has {part} elements; set it to that or more"
            )
    return None
