"""The account of steps: what each rank knows of a step in, one `StepRecord` per step out, in order.

A step's shares travel with the next step's exchange, so its record is written one step late; or at
once, where something is about to depend on it. Why steps are taken or skipped is unknown here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from diptych.core.records import Over, Phase, StepRecord
from diptych.parallel import compiled
from diptych.parallel.mesh import World, gather_numbers
from diptych.parallel.phases import PHASES
from diptych.train.efficiency import Efficiency, StepFlops
from diptych.train.exchange import Counts
from diptych.train.step import StepResult
from diptych.train.usage import NUM_NUMBERS, Memory, over, over_ranks

_PHASES = 6
_MEMORY = _PHASES + len(PHASES)
_BY_SOURCE = _MEMORY + NUM_NUMBERS
"""Where in a rank's share the parts begin."""


@dataclass(frozen=True)
class Done:
    """A step that is done, as this rank knows it.

    Attributes:
        step: Counted from 1.
        counts: Of all ranks' batches.
        result: This rank's share of the loss, and what the engine did.
        step_s: This rank's seconds.
        data_s: Those of them in which it waited for a batch.
        phases: The seconds of each of this rank's phases, with what stood before the step.
        facts: Fields of the record that all ranks hold alike.
    """

    step: int
    counts: Counts
    result: StepResult
    step_s: float
    data_s: float
    phases: Mapping[Phase, float]
    facts: dict[str, Any]


class Ledger:
    """Keeps the last step until all ranks' shares of it are there, then writes its record."""

    def __init__(
        self,
        write: Callable[[StepRecord], None],
        *,
        sources: tuple[str, ...],
        world: World,
        efficiency: Efficiency | None = None,
    ) -> None:
        self._write = write
        self._sources = sources
        self._world = world
        self._efficiency = efficiency
        self._memory = Memory(world.device)
        self._done: Done | None = None
        self._share: list[float] = []

    @property
    def share(self) -> list[float]:
        """This rank's share of the step that has no record yet; empty if each has one."""
        return self._share

    def enter(self, done: Done) -> None:
        """Take in a step; the one before has its record."""
        assert self._done is None, "a step's record is written before the next step is done"
        result = done.result
        num_recompiles = float(compiled.num_recompiles() or 0)
        self._done = done
        self._share = [
            result.loss_sum,
            done.step_s,
            done.data_s,
            num_recompiles,
            result.vision_sum or 0.0,
            time.time(),
            *(done.phases[phase] for phase in PHASES),
            *self._memory.read(),
            *result.loss_sums,
        ]

    def complete(self, shares: np.ndarray) -> None:
        """Write the record, if there is one to write.

        Args:
            shares: [world size, len(share)] float64, what `share` was on every rank.
        """
        done = self._done
        if done is None:
            return
        self._done, self._share = None, []
        step_s = float(shares[:, 1].max())
        flops = None
        if self._efficiency is not None:
            flops = self._efficiency.of(done.counts, step_s=step_s)
        self._write(_record(done, shares=shares, sources=self._sources, flops=flops))

    def settle(self) -> None:
        """Write the record now, without waiting for the next step; every rank calls it."""
        if self._done is not None:
            self.complete(gather_numbers(self._share, world=self._world))


def _record(
    done: Done, *, shares: np.ndarray, sources: tuple[str, ...], flops: StepFlops | None
) -> StepRecord:
    counts, update = done.counts, done.result.update
    step_s = float(shares[:, 1].max())
    num_tokens = counts.num_text_tokens + counts.num_image_tokens
    memory, by_source = shares[:, _MEMORY:_BY_SOURCE], shares[:, _BY_SOURCE:]
    return StepRecord(
        step=done.step,
        loss=_finite(float(shares[:, 0].sum()) / max(1, counts.num_label_tokens)),
        vision_loss=_vision_loss(done, vision_sum=float(shares[:, 4].sum())),
        grad_norm=_finite(update.grad_norm),
        num_rows=counts.num_rows,
        num_samples=counts.num_samples,
        num_label_tokens=counts.num_label_tokens,
        num_text_tokens=counts.num_text_tokens,
        num_image_tokens=counts.num_image_tokens,
        num_patches=counts.num_patches,
        padding_fraction=1.0 - num_tokens / max(1, counts.num_slots),
        step_s=step_s,
        data_s=float(shares[:, 2].max()),
        tokens_per_s=num_tokens / step_s,
        time_s=round(float(shares[0, 5]), 3),
        idle_fraction=counts.idle_fraction,
        skipped=not update.applied,
        loss_scale=update.loss_scale,
        num_recompiles=None if compiled.num_recompiles() is None else int(shares[:, 3].max()),
        grad_norm_by_tower=_finite_ones(update.grad_norm_by_tower),
        phases_s=dict(zip(PHASES, _phases(shares[:, _PHASES:_MEMORY]), strict=True)),
        **over_ranks(memory),
        **({} if flops is None else asdict(flops)),
        **_by_source(counts, loss_sums=by_source.sum(axis=0), sources=sources),
        **done.facts,
    )


def _vision_loss(done: Done, *, vision_sum: float) -> float | None:
    """Return the contrastive loss of a sample; None where none is made, or of no sample."""
    if done.result.vision_sum is None or not done.counts.num_paired:
        return None
    return _finite(vision_sum / done.counts.num_paired)


def _by_source(
    counts: Counts, *, loss_sums: np.ndarray, sources: tuple[str, ...]
) -> dict[str, Any]:
    """Name each source's share of a step; a source without labels in it has no loss."""
    labels = dict(zip(sources, counts.num_label_tokens_by_source, strict=True))
    losses = {
        source: float(loss_sum) / labels[source]
        for source, loss_sum in zip(sources, loss_sums, strict=True)
        if labels[source] and math.isfinite(loss_sum)
    }
    return {
        "loss_by_source": losses,
        "num_samples_by_source": dict(zip(sources, counts.num_samples_by_source, strict=True)),
        "num_label_tokens_by_source": labels,
    }


def _phases(seconds: np.ndarray) -> list[Over]:
    found = [over(column) for column in seconds.T]
    return [each for each in found if each is not None]


def _finite_ones(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
