"""What trains and how fast, read off the optimizer: a model and its optimizer in, a table out.

A parameter that would be forgotten, updated twice, or updated although it is frozen is an error
here, before the first step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn

from diptych.core.errors import RunError
from diptych.core.records import OptimizerKind, Parameter, TowerName, TrainedRow, WhatTrains
from diptych.core.units import format_count
from diptych.model.parameters import list_parameters
from diptych.shape.adapters import is_adapter

_MOST_NAMED = 5
_Part = Literal["weights", "adapters"]
_Like = tuple[TowerName, _Part, OptimizerKind | None, float | None, float | None]
"""A tower, what of it, the algorithm, its rate and its decay; None for what is frozen."""

_FAULTS: dict[str, Callable[[Parameter, int], bool]] = {
    "in no group": lambda each, count: each.trains and not count,
    "in several groups": lambda each, count: count > 1,
    "frozen, and in a group": lambda each, count: not each.trains and count > 0,
}
"""What can be wrong with a parameter that is in so many groups."""


def what_trains(model: nn.Module, *, optimizer: torch.optim.Optimizer) -> WhatTrains:
    """Table what each group of an optimizer has of each tower, and what is frozen.

    Args:
        model: on this rank, whole or sharded, before DeepSpeed takes it apart.
        optimizer: that was made of it; its rates are those of a run's highest.

    Raises:
        RunError: a trained parameter is not in exactly one group, or a frozen one is in any.
    """
    listed = list_parameters(model)
    by_id = {
        id(parameter): each for parameter, each in zip(model.parameters(), listed, strict=True)
    }
    grouped = [
        (by_id.get(id(parameter)), group)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    _check(listed, found=[each for each, _ in grouped])
    groups = {each.name: group for each, group in grouped if each is not None}
    sums: dict[_Like, list[Parameter]] = defaultdict(list)
    for each in listed:
        sums[_like(each, group=groups.get(each.name))].append(each)
    return WhatTrains(
        rows=tuple(_row(*like, parameters=sums[like]) for like in sorted(sums, key=_order))
    )


def write_table(table: WhatTrains) -> str:
    """Write the table as lines of text."""
    head = ("tower", "tensors", "parameters", "optimizer", "lr", "weight decay")
    lines = [head, *(_cells(row) for row in table.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cells(row: TrainedRow) -> tuple[str, ...]:
    whose = f"{row.tower}, adapters" if row.part == "adapters" else row.tower
    counts = (whose, str(row.num_tensors), format_count(row.num_parameters))
    if row.optimizer is None:
        return (*counts, "frozen", "", "")
    return (*counts, row.optimizer, f"{row.lr:.4g}", f"{row.weight_decay:g}")


def _like(parameter: Parameter, *, group: Mapping[str, Any] | None) -> _Like:
    part: _Part = "adapters" if is_adapter(parameter.name) else "weights"
    if group is None:
        return parameter.tower, part, None, None, None
    return parameter.tower, part, group["algorithm"], float(group["lr"]), group["weight_decay"]


def _order(like: _Like) -> tuple[int, float, float]:
    """Order by tower, the fastest first and what is frozen last."""
    tower, _, _, lr, weight_decay = like
    return get_args(TowerName).index(tower), -(lr or 0.0), -(weight_decay or 0.0)


def _row(
    tower: TowerName,
    part: _Part,
    algorithm: OptimizerKind | None,
    lr: float | None,
    weight_decay: float | None,
    *,
    parameters: Sequence[Parameter],
) -> TrainedRow:
    return TrainedRow(
        tower=tower,
        part=part,
        optimizer=algorithm,
        lr=lr,
        weight_decay=weight_decay,
        num_tensors=len(parameters),
        num_parameters=sum(each.num_elements for each in parameters),
    )


def _check(parameters: Sequence[Parameter], *, found: Sequence[Parameter | None]) -> None:
    counts = Counter(each.name for each in found if each is not None)
    said = [
        f"{_some(names)} {what}"
        for what, is_wrong in _FAULTS.items()
        if (names := [each.name for each in parameters if is_wrong(each, counts[each.name])])
    ]
    if strange := found.count(None):
        said.append(f"{strange} tensor(s) in its groups are not the model's")
    if said:
        raise RunError(
            f"The optimizer does not have what trains: {'; '.join(said)}",
            allowed="Every parameter that trains is in one group, and none that is frozen",
            cure="Make it of the model as it is now, after freezing and sharding",
        )


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{rest} {'is' if len(names) == 1 else 'are'}"
