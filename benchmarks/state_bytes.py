"""Bytes that ranks hold: the planner's formula against the live tensors of real ranks.

Weights, gradients and optimizer state of every rank, each storage once, padding and buffers in it.
`peers` is measured over predicted in all, layout by layout; torch's DDP and FSDP2 without Diptych's
code among them. The goal is that every rank's three numbers are equal to the byte.
"""

from __future__ import annotations

import argparse

from _bytes import CELLS, MODEL, Found, measure_cells
from diptych.core.records import HeldBytes
from diptych.model.inspect import inspect
from diptych.plan.memory import held_bytes
from run import Measured


def measure(options: argparse.Namespace) -> Measured:
    """Measure all layouts on 2, 3 and 4 ranks, and compare."""
    shape = inspect(MODEL)
    predicted = {
        cell.name: [
            held_bytes(
                shape,
                layout=cell.layout,
                rank=rank,
                num_micro_batches=cell.num_micro_batches,
            )
            for rank in range(cell.layout.world_size)
        ]
        for cell in CELLS
    }
    return compare(measure_cells(), predicted=predicted)


def compare(found: list[Found], *, predicted: dict[str, list[HeldBytes]]) -> Measured:
    """Divide what was found by what was predicted; the number that is off most counts."""
    totals: dict[str, float] = {}
    worst = 0.0
    for each in found:
        expected = predicted[each.cell]
        held = [rank.held for rank in each.ranks]
        totals[each.name] = sum(one.total for one in held) / sum(one.total for one in expected)
        for mine, wanted in zip(held, expected, strict=True):
            for kind, value in wanted.model_dump().items():
                worst = max(worst, abs(getattr(mine, kind) / value - 1))
    return Measured(
        unit="bytes held by all ranks, measured over predicted",
        ours=1.0,
        peers=totals,
        ratio=worst,
        goal="worst deviation = 0",
        met=worst == 0.0,
        raw={
            "predicted": {
                name: [each.model_dump() for each in ranks] for name, ranks in predicted.items()
            },
            "measured": {
                each.name: [rank.held.model_dump() for rank in each.ranks] for each in found
            },
        },
    )
