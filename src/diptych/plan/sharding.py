"""How FSDP2 divides parameters: a model_shape and a layout in, groups and their sizes out.

`fully_shard` cuts every parameter along its first dimension into equal chunks and pads the last
ones, whatever they lack; a rank beyond the last chunk has padding only. Sizes count elements.

Source: `FSDPParam._init_sharded_param` and `foreach_reduce` of torch.distributed.fsdp.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Literal, get_args

from diptych.core.records import Dtype, Layout, ModelShape, Parameter, TowerName

DTYPE_BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class ShardGroup:
    """Parameters that are gathered and reduced together.

    Attributes:
        is_root: whether it holds what is in no other group.
        parameters: all of them.
        trained: those that get a gradient.
        num_gathers: in a micro-batch.
        stays: whether whole weights stay from the forward pass to the end of the backward pass.
        copy_bytes: of an element while it is gathered.
        num_strays: gathers of a step that nobody needs.
    """

    is_root: bool
    parameters: tuple[Parameter, ...]
    trained: tuple[Parameter, ...]
    num_gathers: int
    stays: bool
    copy_bytes: int
    num_strays: int = 0


def padded_elements(parameter: Parameter, *, num_shards: int) -> int:
    """Count what each rank keeps of a parameter, padding included."""
    first, *rest = parameter.shape
    return -(-first // num_shards) * math.prod(rest)


def local_elements(parameter: Parameter, *, num_shards: int, index: int) -> int:
    """Count what one rank keeps of a parameter, without padding."""
    first, *rest = parameter.shape
    chunk = -(-first // num_shards)
    return min(chunk, max(0, first - index * chunk)) * math.prod(rest)


def shard_groups(model_shape: ModelShape, *, layout: Layout) -> list[ShardGroup]:
    """List what is gathered together: blocks, the root, and what `parallel.fsdp` sets apart.

    Norms that stay fp32 are one group for each tower, and one for each module of a connector. Where
    towers compute in different dtypes, only the language model's rest is the root's. Layers that
    `fsdp.wrap` names are counted as the family's blocks.
    """
    by_name: dict[tuple[str, str], list[Parameter]] = defaultdict(list)
    for parameter in model_shape.parameters:
        by_name[_group(parameter, layout=layout)].append(parameter)
    trained, back = set(model_shape.trained), goes_back(model_shape)
    groups = []
    for (kind, _), parameters in by_name.items():
        stays = kind != "own" or layout.fsdp.gather == "once"
        again = not stays and any(each.name in back for each in parameters)
        tower = "language" if kind == "root" else parameters[0].tower
        precision = layout.mixed_precision.towers.get(tower, layout.precision)
        groups.append(
            ShardGroup(
                is_root=kind == "root",
                parameters=tuple(parameters),
                trained=tuple(each for each in parameters if each in trained),
                num_gathers=2 if again else 1,
                stays=stays,
                copy_bytes=4 if kind == "norms" else DTYPE_BYTES[precision],
            )
        )
    return _with_stray_gather(groups, layout=layout)


def _with_stray_gather(groups: list[ShardGroup], *, layout: Layout) -> list[ShardGroup]:
    """Add what FSDP2 fetches for nothing: the block before those that a backward pass goes through.

    Its own order asks for the block that ran before, whether that has a backward pass or not. The
    next micro-batch's forward pass finds it gathered, so it is one gather a step.
    """
    idle = [
        number for number, group in enumerate(groups) if group.num_gathers == 1 and not group.stays
    ]
    if idle and layout.fsdp.prefetch_backward == 1:
        groups[idle[-1]] = replace(groups[idle[-1]], num_strays=1)
    return groups


def _group(parameter: Parameter, *, layout: Layout) -> tuple[Literal["norms", "own", "root"], str]:
    """Say which group a parameter is in: of norms, of its own, or the root's."""
    module, _, _ = parameter.name.rpartition(".")
    if "norms" in layout.mixed_precision.keep_fp32 and "norm" in module.rpartition(".")[2]:
        return "norms", module if parameter.tower == "connector" else parameter.tower
    if parameter.block:
        return "own", parameter.block
    options = layout.mixed_precision
    dtypes = {tower: options.towers.get(tower, layout.precision) for tower in get_args(TowerName)}
    is_root = parameter.tower == "language" or (
        parameter.tower == "head" and dtypes["head"] == dtypes["language"]
    )
    if len(set(dtypes.values())) == 1 or is_root:
        return "root", ""
    return "own", module


def goes_back(model_shape: ModelShape) -> frozenset[str]:
    """Name the parameters through which a gradient passes: from the first that trains to the loss.

    The way is tower by tower, and within a tower the model's order.
    """
    way = sorted(model_shape.parameters, key=lambda each: get_args(TowerName).index(each.tower))
    first = next((number for number, each in enumerate(way) if each.trains), len(way))
    return frozenset(each.name for each in way[first:])
