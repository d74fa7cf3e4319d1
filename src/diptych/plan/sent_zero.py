"""Bytes that a rank sends in a step of DeepSpeed's ZeRO: a model_shape and a layout in, bytes out.

Stages 1 and 2 reduce gradients to all ranks, although each needs a part only, and gather the
updated weights. Stage 3 scatters gradients, and gathers weights where they are used.

Source: deepspeed 0.19, `DeepSpeedZeroOptimizer.average_tensor` (its default
`use_multi_rank_bucket_allreduce`), `PartitionedParameterCoordinator`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate, groupby

from diptych.core.records import Layout, ModelShape, Parameter
from diptych.plan.sharding import DTYPE_BYTES, goes_back

_Module = tuple[Parameter, ...]


def zero_sent_bytes(model_shape: ModelShape, *, layout: Layout, num_micro_batches: int) -> float:
    """Return the bytes that a rank sends in one step; stage 1 reduces in the last micro-batch."""
    ring = (layout.shard - 1) / layout.shard
    copy = DTYPE_BYTES[layout.precision]
    reduce = DTYPE_BYTES[layout.mixed_precision.reduce]
    if layout.zero.stage == 3:
        trained = _padded(model_shape.trained, layout=layout)
        gathered = copy * _gathered(model_shape, layout=layout, num_micro_batches=num_micro_batches)
        return ring * (gathered + num_micro_batches * reduce * trained)
    trained = sum(math.prod(each.shape) for each in model_shape.trained)
    num_reduces = num_micro_batches if layout.zero.stage == 2 else 1
    return ring * (2 * num_reduces * reduce * trained + copy * trained)


def _gathered(model_shape: ModelShape, *, layout: Layout, num_micro_batches: int) -> int:
    """Count elements: small parameters once after the update, the others where they are used."""
    most = layout.zero.persistence_threshold_elements
    small = [each for each in model_shape.parameters if math.prod(each.shape) <= most]
    once = _padded(small, layout=layout)
    fetched = sum(
        _padded((each for each in module if math.prod(each.shape) > most), layout=layout)
        for module in _fetches(model_shape, layout=layout)
    )
    return once + num_micro_batches * fetched


def _fetches(model_shape: ModelShape, *, layout: Layout) -> Iterator[_Module]:
    """Yield every module as often as one micro-batch gathers it.

    After it ran, its weights are freed unless they are used again before so many elements have
    passed, or the prefetch has come across them.
    """
    options = layout.zero
    window = min(options.prefetch_elements, options.max_live_elements)
    order = _modules(model_shape)
    names = goes_back(model_shape)
    # The head's call is on every gradient's way, even where its weights are a frozen embedding's.
    back = [module for module in order[:-1] if any(each.name in names for each in module)]
    back.append(order[-1])
    trace = [*order, *reversed(back)]
    sizes = [sum(math.prod(each.shape) for each in module) for module in trace]
    passed = list(accumulate(sizes, initial=0))
    last_use: dict[_Module, int] = {}
    for number, module in enumerate(trace):
        before = last_use.get(module)
        if before is None or not (
            passed[number] - passed[before + 1] < options.max_reuse_distance_elements
            or passed[number + 1] - passed[before + 1] <= window
        ):
            yield module
        last_use[module] = number


def _modules(model_shape: ModelShape) -> list[_Module]:
    """List the modules that have parameters as they run; a tied embedding is first and last."""
    by_module = groupby(model_shape.parameters, key=lambda each: each.name.rpartition(".")[0])
    order = [tuple(listed) for _, listed in by_module]
    tied = set(model_shape.tied_parameters.values())
    shared = [(each,) for each in model_shape.parameters if each.name in tied]
    return [*shared, *(module for module in order if module not in shared), *shared]


def _padded(parameters: Iterable[Parameter], *, layout: Layout) -> int:
    """Count elements, every parameter's a multiple of the number of ranks."""
    shard = layout.shard
    return sum(-(-math.prod(each.shape) // shard) * shard for each in parameters)
