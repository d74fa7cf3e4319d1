"""What is wrong with a run: a seed in, a kind, its strength and the run's base settings out.

A healthy run is a scenario of kind `healthy`. Strengths are shares of a healthy step's time, but
for `slow_disk` (steps that a checkpoint takes), `nan` (steps that are hit), `tiny_kernels` (MFU)
and `throttled` (the clock that is left). All runs are DDP: a model this small under FSDP2 over gloo
is bound by its exchange (24% of the time), and so is not healthy.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "healthy",
    "slow_decode",
    "straggler",
    "slow_all_reduce",
    "slow_disk",
    "tiny_kernels",
    "vision_load",
    "nan",
    "throttled",
]

EXPECTED: dict[Kind, tuple[str, ...]] = {
    "slow_decode": ("data", "decode_cpu"),
    "straggler": ("straggler",),
    "slow_all_reduce": ("communication",),
    "slow_disk": ("checkpoint",),
    "tiny_kernels": ("small_kernels",),
    "vision_load": ("vision_imbalance",),
    "nan": ("nan_risk",),
    "throttled": ("throttling",),
}
"""The bounds that name a kind; slow decoding is the processors' fault where they are busy."""

NEED_DEVICES: tuple[Kind, ...] = ("tiny_kernels", "throttled")
"""Kinds that a machine without GPU cannot show: their records are always synthetic."""

_STRENGTHS: dict[Kind, tuple[float, float]] = {
    "healthy": (0.0, 0.0),
    "slow_decode": (0.35, 1.0),
    "straggler": (0.3, 0.8),
    "slow_all_reduce": (0.4, 1.0),
    "slow_disk": (2.0, 5.0),
    "tiny_kernels": (0.02, 0.07),
    "vision_load": (0.5, 1.0),
    "nan": (2.0, 6.0),
    "throttled": (0.45, 0.75),
}


@dataclass(frozen=True)
class Scenario:
    """One run to judge.

    Attributes:
        seed: what all of it was drawn from.
        kind: what is wrong.
        strength: how much; see the module.
        num_steps: of the run.
        num_ranks: of the simulated run; a real one has two.
        global_batch: rows of a step, and so on as in the settings.
        group: rows of like shape that stay together.
        num_workers: loader processes of a rank.
        mode: how rows are made.
    """

    seed: int
    kind: Kind
    strength: float
    num_steps: int
    num_ranks: int
    global_batch: int
    group: int
    num_workers: int
    mode: Literal["bucket", "pack"]

    @property
    def micro_batch(self) -> int:
        """Rows of a micro-batch."""
        return self.group if self.mode == "bucket" else 2

    @property
    def needs_devices(self) -> bool:
        """Whether its records are synthetic on any machine."""
        return self.kind in NEED_DEVICES


def draw(seed: int, *, is_healthy: bool = False) -> Scenario:
    """Draw a scenario; kinds come in turn over each eight seeds, in an order that is drawn."""
    number = random.Random(f"{seed} {is_healthy}")
    kinds = sorted(EXPECTED)
    random.Random(f"order {seed // len(kinds)}").shuffle(kinds)
    kind: Kind = "healthy" if is_healthy else kinds[seed % len(kinds)]
    least, most = _STRENGTHS[kind]
    return Scenario(
        seed=seed,
        kind=kind,
        strength=number.uniform(least, most),
        num_steps=number.choice((40, 50, 60)),
        num_ranks=number.choice((2, 4, 8)),
        global_batch=number.choice((16, 32)),
        group=number.choice((4, 8)),
        num_workers=number.choice((0, 0, 1)),
        mode=number.choice(("bucket", "bucket", "pack")),
    )
