"""Bytes that ranks send in a step: the planner's formula against what real ranks were seen to send.

Every collective of every rank is counted, norms and flags too. `peers` is measured over predicted,
layout by layout; torch's DDP and FSDP2 without Diptych's code among them. The goal is that none is
off by more than a hundredth.
"""

from __future__ import annotations

import argparse

from _bytes import CELLS, MODEL, Found, measure_cells
from diptych.model.inspect import inspect
from diptych.plan.sent import sent_bytes
from run import Measured

GOAL = 0.01


def measure(options: argparse.Namespace) -> Measured:
    """Count all layouts on 2, 3 and 4 ranks, and compare."""
    shape = inspect(MODEL)
    predicted = {
        cell.name: sent_bytes(shape, layout=cell.layout, num_micro_batches=cell.num_micro_batches)
        for cell in CELLS
    }
    return compare(measure_cells(), predicted=predicted)


def compare(found: list[Found], *, predicted: dict[str, float]) -> Measured:
    """Divide what was counted by what was predicted; the rank that is off most counts."""
    ratios: dict[str, float] = {}
    for each in found:
        rates = [rank.sent_bytes / predicted[each.cell] for rank in each.ranks]
        ratios[each.name] = max(rates, key=lambda rate: abs(rate - 1))
    worst = max(abs(ratio - 1) for ratio in ratios.values())
    return Measured(
        unit="bytes sent by a rank in a step, measured over predicted",
        ours=1.0,
        peers=ratios,
        ratio=worst,
        goal=f"worst deviation <= {GOAL}",
        met=worst <= GOAL,
        raw={
            "predicted": predicted,
            "measured": {each.name: [rank.sent_bytes for rank in each.ranks] for each in found},
            "by_kind": {each.name: each.ranks[0].by_kind for each in found},
        },
    )
