"""Bytes that a rank holds: a model_shape, a layout and a micro-batch in, bytes out.

Training in fp32, and under bf16 with fp32 weights, holds 16 bytes a parameter: weight 4, gradient
4, Adam's two moments 8. `ddp` holds them whole on each rank, `fsdp2` divides them by `shard`.
"""

from __future__ import annotations

import math
from collections import Counter

from diptych.core.records import Layout, ModelShape
from diptych.shape.families import family
from diptych.shape.flops import BatchCounts

STATE_BYTES = 16
"""Of one trained parameter: fp32 weight, gradient, and Adam's two moments."""

PROCESS_BYTES = {"cpu": 850_000_000, "cuda": 1_500_000_000}
"""What a rank costs before it holds a tensor: torch and its libraries; on a GPU the context and
the communicator's buffers. Measured for a CPU with torch 2.14; for a GPU a cautious guess."""


def held_bytes(model_shape: ModelShape, *, layout: Layout) -> int:
    """Return the bytes of weights, gradients and optimizer state that a rank holds throughout."""
    return STATE_BYTES * -(-model_shape.num_parameters // _num_shards(layout))


def peak_bytes(
    model_shape: ModelShape, *, layout: Layout, counts: BatchCounts, num_micro_batches: int
) -> int:
    """Return the most that a rank holds at once.

    Args:
        model_shape: the model.
        layout: how it is spread.
        counts: the heaviest micro-batch.
        num_micro_batches: of one step; gradients of more than one may have to wait unsharded.
    """
    known = family(model_shape.family)
    activations = known.activation_bytes(
        model_shape.sizes, counts=counts, precision=layout.precision
    )
    return math.ceil(
        held_bytes(model_shape, layout=layout)
        + gathered_bytes(model_shape, layout=layout, num_micro_batches=num_micro_batches)
        + activations
        + PROCESS_BYTES[layout.device]
    )


def gathered_bytes(model_shape: ModelShape, *, layout: Layout, num_micro_batches: int) -> int:
    """Return the bytes that come and go beside the states, activations aside.

    `ddp` under bf16 keeps a bf16 copy of the weights through a micro-batch. `fsdp2` gathers the
    root's parameters for a whole micro-batch and two blocks' at a time (the next one is fetched
    ahead), with their whole gradients before they are reduced; gradients that wait for the step's
    last micro-batch wait whole.
    """
    num_parameters = model_shape.num_parameters
    copy_bytes = 2 if layout.precision == "bf16" else 4
    if layout.engine == "ddp":
        return copy_bytes * num_parameters if layout.precision == "bf16" else 0
    by_block = Counter()
    for parameter in model_shape.parameters:
        by_block[parameter.block] += math.prod(parameter.shape)
    root = by_block.pop("", 0)
    block = max(by_block.values(), default=0)
    gathered = copy_bytes * (root + 2 * block) + 4 * (root + block)
    waits = num_micro_batches > 1 and layout.grad_sync == "last"
    return gathered + (4 * num_parameters if waits else 0)


def _num_shards(layout: Layout) -> int:
    split = layout.tp * layout.pp
    return split * layout.shard if layout.engine == "fsdp2" else split
