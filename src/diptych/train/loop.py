"""The training loop: batches in, step records and saved states out, the model changed in place.

It knows neither the launcher, nor what becomes of a record, nor how a state is written: those are
its `Hooks`. Every collective is reached by every rank in every step; a decision (stop, skip, save)
is made from numbers that all ranks hold alike, between two steps.

In the order of events, step k is: fetch the batch of step k+1; begin the exchange, which carries
its counts, the results of step k-1, and whether a rank was asked to stop; compute step k; wait for
the exchange; write the record of step k-1. Whatever reads the log later than a step (a checkpoint,
the end) has the step's record written first, by a gather of its own. A stop request that comes
during step k-1 is told in step k, and heeded after it.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from diptych.core.records import OptimizerSpec, StepRecord
from diptych.data.collate import MicroBatch
from diptych.data.loader import StepBatch
from diptych.parallel.engine import Engine
from diptych.parallel.mesh import World, gather_numbers
from diptych.parallel.phases import Phases
from diptych.train.efficiency import Efficiency
from diptych.train.exchange import Agreed, Counts, begin_exchange
from diptych.train.guards import SkipGuard
from diptych.train.heldout import HeldoutLoss
from diptych.train.ledger import Done, Ledger
from diptych.train.nonfinite import name_nonfinite
from diptych.train.schedules import learning_rate, lr_by_tower
from diptych.train.step import StepResult, run_step


@dataclass(frozen=True)
class LoopSettings:
    """When the loop does what; counts are optimizer steps, 0 means never. `sources` by number.

    `scores_saves`: every checkpoint's held-out loss is measured.
    """

    num_steps: int
    seed: int
    optimizer: OptimizerSpec
    checkpoint_every_steps: int
    heldout_every_steps: int
    checkpoint_min_interval_s: float = 0.0
    weights_every_steps: int = 0
    scores_saves: bool = False
    attempt: int = 0
    sources: tuple[str, ...] = ()
    release_cache_every_steps: int = 0
    name_nonfinite: bool = False


@dataclass
class TrainState:
    """Where the run is: the next step, the last one's epoch and that epoch's first step.

    And what did not count: masked samples and skipped steps; and how many updates there were before
    the optimizer began anew (in a fork that keeps the weights alone).
    """

    step: int = 0
    epoch: int = 0
    first_step: int = 0
    num_masked: int = 0
    skipped_steps: list[int] = field(default_factory=list)
    num_former_updates: int = 0
    stopped: bool = False

    @property
    def num_updates(self) -> int:
        """Count the optimizer's updates: steps that were not skipped."""
        return self.step - len(self.skipped_steps) - self.num_former_updates


class Saves(Protocol):
    """What keeps the state of a run; `train.checkpoints` does."""

    @property
    def share(self) -> tuple[float, float]:
        """What this rank tells the others of a save that is under way."""
        ...

    @property
    def num_failed(self) -> int:
        """How many saves came to nothing."""
        ...

    def observe(self, shares: np.ndarray, *, step_s: float) -> None:
        """Take in what all ranks told, [world size, 2], and a step's seconds."""
        ...

    def save(self, state: TrainState) -> None:
        """Save a state, at once or beside the steps that follow."""
        ...

    def save_weights(self, state: TrainState) -> None:
        """Save the weights alone."""
        ...

    def conclude(self, state: TrainState) -> None:
        """See to it that a state is saved."""
        ...


@dataclass(frozen=True)
class Hooks:
    """What the loop calls: all on every rank, in the same order.

    `place` puts a micro-batch where the model is. `phases` is told what this rank does when.
    `efficiency` counts FLOPs, on the rank that writes records. `profile_requested` says how many
    steps this rank is asked to profile, and `after_step` is told of a step and what was agreed,
    and says whether the next step is a profiled one.
    """

    record: Callable[[StepRecord], None]
    saves: Saves
    heldout: Callable[[], HeldoutLoss]
    stop_requested: Callable[[], bool]
    place: Callable[[MicroBatch], MicroBatch] = lambda batch: batch
    profile_requested: Callable[[], int] = lambda: 0
    after_step: Callable[[int, int], bool] = lambda step, num_profiled: False
    phases: Phases = field(default_factory=lambda: Phases(torch.device("cpu")))
    efficiency: Efficiency | None = None


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
    with hooks.phases.watching_waits():
        return _train(
            batches, engine=engine, state=state, settings=settings, hooks=hooks, world=world
        )


def _train(
    batches: Iterator[StepBatch],
    *,
    engine: Engine,
    state: TrainState,
    settings: LoopSettings,
    hooks: Hooks,
    world: World,
) -> TrainState:
    guard, phases = SkipGuard(), hooks.phases
    ledger = Ledger(
        hooks.record, sources=settings.sources, world=world, efficiency=hooks.efficiency
    )
    engine.module.train()
    saved_step, saved_s = state.step, (started := time.perf_counter())
    batch, data_s = _fetch(batches, is_needed=state.step < settings.num_steps, phases=phases)
    agreed = _begin(batch, ledger=ledger, hooks=hooks, saved_s=saved_s, world=world)()
    profiled = hooks.after_step(state.step, agreed.num_profiled)
    while batch is not None:
        if agreed.stop:
            state.stopped = True
            break
        counts = agreed.counts
        assert counts is not None, "where there is a batch, it is counted"
        is_needed = state.step + 1 < settings.num_steps
        following, waited_s = _fetch(batches, is_needed=is_needed, phases=phases)
        wait = _begin(following, ledger=ledger, hooks=hooks, saved_s=saved_s, world=world)
        # Every (seed, step, rank) has its own random stream, so nothing random needs saving.
        seed = partial(_seed, settings.seed, step=state.step, world=world)
        seed()
        lr = learning_rate(state.step, spec=settings.optimizer, num_steps=settings.num_steps)
        result = run_step(
            batch.micro_batches,
            engine=engine,
            num_label_tokens=counts.num_label_tokens,
            num_paired=counts.num_paired,
            lr=lr,
            max_grad_norm=settings.optimizer.max_grad_norm,
            place=hooks.place,
            phases=phases,
        )
        agreed = wait()
        ledger.complete(agreed.shares)
        step_s, data_s, taken = time.perf_counter() - started, data_s + waited_s, phases.take()
        hooks.saves.observe(agreed.saving, step_s=step_s)
        found = None
        if settings.name_nonfinite and _is_unexplained(result, world=world):
            found = name_nonfinite(
                batch.micro_batches,
                engine=engine,
                world=world,
                num_label_tokens=counts.num_label_tokens,
                num_paired=counts.num_paired,
                seed=seed,
                place=hooks.place,
            )
        _advance(state, batch=batch, counts=counts, result=result)
        was_profiled, profiled = profiled, hooks.after_step(state.step, agreed.num_profiled)
        _release_cache(state.step, every=settings.release_cache_every_steps, world=world)
        save_is_due = _save_is_due(state.step - saved_step, agreed=agreed, settings=settings)
        facts = {
            **_rates(lr, spec=settings.optimizer),
            "nonfinite": found,
            "profiled": was_profiled,
            **_facts(state, settings=settings, hooks=hooks, save_is_due=save_is_due),
        }
        ledger.enter(Done(state.step, counts, result, step_s, data_s, phases=taken, facts=facts))
        if save_is_due or not result.update.applied:
            ledger.settle()
        guard.observe(state.step - 1, update=result.update, found=found)
        if _due(state.step, every=settings.weights_every_steps):
            hooks.saves.save_weights(state)
        if save_is_due:
            with phases.of("checkpoint"):
                hooks.saves.save(state)
            saved_step, saved_s = state.step, time.perf_counter()
        batch, data_s, started = following, 0.0, time.perf_counter()
    ledger.settle()
    hooks.saves.conclude(state)
    return state


def _fetch(
    batches: Iterator[StepBatch], *, is_needed: bool, phases: Phases
) -> tuple[StepBatch | None, float]:
    """Take the next batch; return the seconds that it took, too."""
    started = time.perf_counter()
    with phases.of("data"):
        batch = next(batches) if is_needed else None
    return batch, time.perf_counter() - started


def _begin(
    following: StepBatch | None, *, ledger: Ledger, hooks: Hooks, saved_s: float, world: World
) -> Callable[[], Agreed]:
    """Tell the other ranks of the next batch, the step before, and what this rank was asked."""
    return begin_exchange(
        following,
        share=ledger.share,
        stop=hooks.stop_requested(),
        num_profiled=hooks.profile_requested(),
        since_save_s=time.perf_counter() - saved_s,
        saving=hooks.saves.share,
        world=world,
    )


def _rates(lr: float, *, spec: OptimizerSpec) -> dict[str, Any]:
    return {"lr": lr, "lr_by_tower": lr_by_tower(lr, spec=spec)}


def _facts(
    state: TrainState, *, settings: LoopSettings, hooks: Hooks, save_is_due: bool
) -> dict[str, Any]:
    """Collect what else the record of the step that is just done holds."""
    due = _due(state.step, every=settings.heldout_every_steps, last=settings.num_steps)
    due = due or (save_is_due and settings.scores_saves)
    return {
        "epoch": state.epoch,
        "num_masked": state.num_masked,
        "num_skipped": len(state.skipped_steps),
        "num_failed_saves": hooks.saves.num_failed,
        "attempt": settings.attempt,
        **(_heldout(hooks, sources=settings.sources) if due else {}),
    }


def _heldout(hooks: Hooks, *, sources: tuple[str, ...]) -> dict[str, Any]:
    with hooks.phases.of("heldout"):
        found = hooks.heldout()
    by_source = zip(sources, found.by_source, strict=True)
    return {
        "heldout_loss": found.mean,
        "heldout_loss_by_source": {name: loss for name, loss in by_source if loss is not None},
    }


def _advance(state: TrainState, *, batch: StepBatch, counts: Counts, result: StepResult) -> None:
    if not result.update.applied:
        state.skipped_steps.append(state.step)
    state.num_masked += counts.num_masked
    state.epoch = batch.epoch
    state.first_step = batch.step - batch.number
    state.step += 1


def _is_unexplained(result: StepResult, *, world: World) -> bool:
    """Whether a step was skipped, and not because fp16's loss scale is still being searched for."""
    update = result.update
    if update.applied or not update.can_shrink:
        return not update.applied
    sums = [result.loss_sum, result.vision_sum or 0.0]
    return not math.isfinite(gather_numbers(sums, world=world).sum())


def _due(step: int, *, every: int, last: int | None = None) -> bool:
    return every > 0 and (step % every == 0 or step == last)


def _save_is_due(num_steps: int, *, agreed: Agreed, settings: LoopSettings) -> bool:
    """Whether so many steps and seconds since the last save ask for the next one."""
    every = settings.checkpoint_every_steps
    return 0 < every <= num_steps and agreed.since_save_s >= settings.checkpoint_min_interval_s


def _release_cache(step: int, *, every: int, world: World) -> None:
    """Give blocks that torch keeps unused back to the device; a CPU's are given back anyway."""
    if every and step % every == 0 and world.device.type == "cuda":
        torch.cuda.empty_cache()


def _seed(run_seed: int, *, step: int, world: World) -> None:
    """Seed this rank's generators; `torch.manual_seed` costs half a millisecond without a GPU."""
    seed = _stream_seed(run_seed, step=step, rank=world.rank)
    torch.default_generator.manual_seed(seed)
    if world.device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _stream_seed(seed: int, *, step: int, rank: int) -> int:
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
