"""The training loop: batches in, step records and saved states out, the model changed in place.

It knows neither the launcher, nor what becomes of a record, nor how a state is written: those are
its `Hooks`. Every collective is reached by every rank in every step; a decision (stop, skip) is
made from numbers that all ranks hold alike.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from diptych.core.records import OptimizerSpec, StepRecord
from diptych.data.collate import MicroBatch
from diptych.data.loader import StepBatch
from diptych.parallel import compiled
from diptych.parallel.engine import Engine
from diptych.parallel.mesh import World, gather_numbers
from diptych.train.guards import SkipGuard
from diptych.train.heldout import HeldoutLoss
from diptych.train.nonfinite import name_nonfinite
from diptych.train.optimizers import learning_rate
from diptych.train.step import StepResult, run_step


@dataclass(frozen=True)
class LoopSettings:
    """When the loop does what; counts are optimizer steps, 0 means never. `sources` by number."""

    num_steps: int
    seed: int
    optimizer: OptimizerSpec
    checkpoint_every_steps: int
    heldout_every_steps: int
    checkpoint_min_interval_s: float = 0.0
    attempt: int = 0
    sources: tuple[str, ...] = ()
    release_cache_every_steps: int = 0
    name_nonfinite: bool = False


@dataclass
class TrainState:
    """Where the run is: the next step, the last one's epoch and that epoch's first step.

    And what did not count: masked samples and skipped steps.
    """

    step: int = 0
    epoch: int = 0
    first_step: int = 0
    num_masked: int = 0
    skipped_steps: list[int] = field(default_factory=list)
    stopped: bool = False

    @property
    def num_updates(self) -> int:
        """Count the optimizer's updates: steps that were not skipped."""
        return self.step - len(self.skipped_steps)


@dataclass(frozen=True)
class Hooks:
    """What the loop calls: all on every rank, in the same order.

    `place` puts a micro-batch where the model is.
    """

    record: Callable[[StepRecord], None]
    save: Callable[[TrainState], None]
    heldout: Callable[[], HeldoutLoss]
    stop_requested: Callable[[], bool]
    place: Callable[[MicroBatch], MicroBatch] = lambda batch: batch


def train(
    batches: Iterator[StepBatch],
    *,
    engine: Engine,
    state: TrainState,
    settings: LoopSettings,
    hooks: Hooks,
    world: World,
) -> TrainState:
    """Run the steps that are left, or up to a stop request; save at the end of either."""
    guard = SkipGuard()
    saved_step, saved_s = state.step, time.perf_counter()
    engine.module.train()
    while state.step < settings.num_steps:
        started = time.perf_counter()
        batch = next(batches)
        data_s = time.perf_counter() - started
        counts, stop = _agree_before(batch, world=world, stop=hooks.stop_requested())
        if stop:
            state.stopped = True
            break
        lr = learning_rate(state.step, spec=settings.optimizer, num_steps=settings.num_steps)
        # Every (seed, step, rank) has its own random stream, so nothing random needs saving.
        stream = _stream_seed(settings.seed, step=state.step, rank=world.rank)
        seed = partial(_seed, stream, world=world)
        seed()
        result = run_step(
            batch.micro_batches,
            engine=engine,
            num_label_tokens=counts.num_label_tokens,
            lr=lr,
            max_grad_norm=settings.optimizer.max_grad_norm,
            place=hooks.place,
        )
        now = time.perf_counter()
        step_s = now - started
        num_recompiles = float(compiled.num_recompiles() or 0)
        shares = gather_numbers(
            [result.loss_sum, step_s, data_s, now - saved_s, num_recompiles, *result.loss_sums],
            world=world,
        )
        found = None
        if settings.name_nonfinite and _is_unexplained(result, loss_sum=shares[:, 0].sum()):
            found = name_nonfinite(
                batch.micro_batches,
                engine=engine,
                world=world,
                weight=1.0 / max(1, counts.num_label_tokens),
                seed=seed,
                place=hooks.place,
            )
        guard.observe(state.step, update=result.update, found=found)
        _advance(state, batch=batch, counts=counts, result=result)
        _release_cache(state.step, every=settings.release_cache_every_steps, world=world)
        due = _due(state.step, every=settings.heldout_every_steps, last=settings.num_steps)
        measured = {
            "lr": lr,
            "attempt": settings.attempt,
            "nonfinite": found,
            **_by_source(counts, loss_sums=shares[:, 5:].sum(axis=0), sources=settings.sources),
            **(_heldout(hooks.heldout(), sources=settings.sources) if due else {}),
        }
        hooks.record(_record(state, counts=counts, result=result, shares=shares, **measured))
        # The first rank's clock decides for all.
        if _save_is_due(state.step - saved_step, since_s=float(shares[0, 3]), settings=settings):
            hooks.save(state)
            saved_step, saved_s = state.step, time.perf_counter()
    if saved_step != state.step:
        hooks.save(state)
    return state


@dataclass(frozen=True)
class _Counts:
    """What the ranks' batches hold together; the last two have one number for each source."""

    num_rows: int
    num_samples: int
    num_label_tokens: int
    num_text_tokens: int
    num_image_tokens: int
    num_patches: int
    num_slots: int
    num_masked: int
    idle_fraction: float | None
    num_samples_by_source: list[int]
    num_label_tokens_by_source: list[int]


def _agree_before(batch: StepBatch, *, world: World, stop: bool) -> tuple[_Counts, bool]:
    """Add up the ranks' counts, and stop if any rank was asked to."""
    local = [
        batch.num_rows,
        batch.num_samples,
        batch.num_label_tokens,
        batch.num_text_tokens,
        batch.num_image_tokens,
        batch.num_patches,
        batch.num_slots,
        len(batch.masked_keys),
    ]
    by_source = [*batch.num_samples_by_source, *batch.num_label_tokens_by_source]
    ranks = gather_numbers([float(stop), batch.cost, *local, *by_source], world=world)
    costs = ranks[:, 1]
    totals = [int(total) for total in ranks[:, 2:].sum(axis=0)]
    samples, labels = np.split(np.array(totals[len(local) :], dtype=np.int64), 2)
    counts = _Counts(
        *totals[: len(local)],
        idle_fraction=float(1.0 - costs.mean() / costs.max()) if costs.max() > 0 else None,
        num_samples_by_source=samples.tolist(),
        num_label_tokens_by_source=labels.tolist(),
    )
    return counts, bool(ranks[:, 0].any())


def _by_source(
    counts: _Counts, *, loss_sums: np.ndarray, sources: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
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


def _heldout(found: HeldoutLoss, *, sources: tuple[str, ...]) -> dict[str, Any]:
    by_source = zip(sources, found.by_source, strict=True)
    return {
        "heldout_loss": found.mean,
        "heldout_loss_by_source": {name: loss for name, loss in by_source if loss is not None},
    }


def _advance(state: TrainState, *, batch: StepBatch, counts: _Counts, result: StepResult) -> None:
    if not result.update.applied:
        state.skipped_steps.append(state.step)
    state.num_masked += counts.num_masked
    state.epoch = batch.epoch
    state.first_step = batch.step - batch.number
    state.step += 1


def _record(
    state: TrainState,
    *,
    counts: _Counts,
    result: StepResult,
    shares: np.ndarray,
    **measured: Any,
) -> StepRecord:
    """Describe the step that `state` has just left behind; `step` counts from 1."""
    step_s = float(shares[:, 1].max())
    num_tokens = counts.num_text_tokens + counts.num_image_tokens
    return StepRecord(
        step=state.step,
        epoch=state.epoch,
        loss=_finite(float(shares[:, 0].sum()) / max(1, counts.num_label_tokens)),
        grad_norm=_finite(result.update.grad_norm),
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
        idle_fraction=counts.idle_fraction,
        skipped=not result.update.applied,
        loss_scale=result.update.loss_scale,
        num_recompiles=None if compiled.num_recompiles() is None else int(shares[:, 4].max()),
        num_masked=state.num_masked,
        num_skipped=len(state.skipped_steps),
        **measured,
    )


def _is_unexplained(result: StepResult, *, loss_sum: float) -> bool:
    """Whether a step was skipped, and not because fp16's loss scale is still being searched for."""
    update = result.update
    return not update.applied and not (update.can_shrink and math.isfinite(loss_sum))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _due(step: int, *, every: int, last: int) -> bool:
    return every > 0 and (step % every == 0 or step == last)


def _save_is_due(num_steps: int, *, since_s: float, settings: LoopSettings) -> bool:
    """Whether so many steps and seconds since the last save ask for the next one."""
    every = settings.checkpoint_every_steps
    return 0 < every <= num_steps and since_s >= settings.checkpoint_min_interval_s


def _release_cache(step: int, *, every: int, world: World) -> None:
    """Give blocks that torch keeps unused back to the device; a CPU's are given back anyway."""
    if every and step % every == 0 and world.device.type == "cuda":
        torch.cuda.empty_cache()


def _seed(seed: int, *, world: World) -> None:
    """Seed this rank's generators; `torch.manual_seed` costs half a millisecond without a GPU."""
    torch.default_generator.manual_seed(seed)
    if world.device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _stream_seed(seed: int, *, step: int, rank: int) -> int:
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
