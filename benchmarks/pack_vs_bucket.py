"""The starter data packed into rows, beside rows of one sample: the loss reached, and the speed.

Ours is the recipe `starter_cpu_pack`; its peer the base (mode `bucket`), both as `kedro run` trains
them, with as many samples in a step and a schedule of the learning rate as long as the run. For
each seed both train to the end in the same two processes, in turns of a few steps, so that whatever
else the machine does meets both alike. Compared are

- the loss of all held-out samples after the last step: means over seeds, and the noise, which is
  the standard error of their difference;
- label tokens a processor second: those of a turn's steps by the step log, over the processor time
  of the rank that is busier in the turn, batches and all. On idle cores a turn takes as long; on
  busy ones the clock would measure what else they do, so its figures are raw. The first and last
  turns (start; held-out loss and checkpoint) are left out.

What packing saves by settings that are near: the first seed is also trained in random batches
(`group: 1`, padded to the longest row of each micro-batch), and in buckets with one micro-batch a
rank instead of two. Their figures are raw.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

from _ranks import run_ranks
from _starter import compose_run, prepare_starter
from _turns import Turns
from diptych.core.records import RunSpec, StepRecord
from diptych.monitor.run_folder import RunFolder
from run import Measured

WORLD_SIZE = 2
NUM_STEPS = 300
SEEDS = (0, 1, 2)
STEPS_PER_TURN = 10
MIN_SPEEDUP = 1.3
MAX_NOISES = 2.0
"""Means may differ by so many standard errors of their difference."""

OURS, PEER = "pack", "bucket"
NEAR: dict[str, dict[str, Any]] = {
    "random": {"schedule": {"group": 1}},
    "bucket, one micro-batch": {"layout": {"micro_batch": 16}},
}
"""Settings that differ from the base's."""


class Turn(NamedTuple):
    """What a turn took: processor time, and the clock's."""

    cpu_s: float
    s: float


@dataclass
class Found:
    """One run: its held-out loss in nats per label token, and each turn's seconds and counts.

    `turn_cpu_s` is processor time, `turn_s` the clock's.
    """

    heldout_loss: float
    turn_cpu_s: list[float]
    turn_s: list[float]
    turn_label_tokens: list[int]
    means: dict[str, float] = field(default_factory=dict)

    @property
    def label_tokens_per_s(self) -> float:
        """The median over turns, by processor time."""
        return statistics.median(self.rates())

    def rates(self, *, clock: Literal["turn_cpu_s", "turn_s"] = "turn_cpu_s") -> list[float]:
        """Return each turn's label tokens a second."""
        seconds = getattr(self, clock)
        return [n / s for n, s in zip(self.turn_label_tokens, seconds, strict=True)]


def measure(options: argparse.Namespace) -> Measured:
    """Train both with every seed, in turns."""
    found: dict[str, list[Found]] = {}
    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder:
        starter = prepare_starter(Path(folder))
        for seed in SEEDS:
            train = {
                "num_steps": NUM_STEPS,
                "seed": seed,
                "heldout_every_steps": NUM_STEPS,
                "heldout_max_samples": 1_000_000,
                "checkpoint_every_steps": NUM_STEPS,
            }
            settings: dict[str, dict[str, Any]] = {
                PEER: {"recipe": "base"},
                OURS: {"recipe": "starter_cpu_pack"},
            }
            if seed == SEEDS[0]:
                settings |= {name: {"recipe": "base", **each} for name, each in NEAR.items()}
            specs = {}
            for name, each in settings.items():
                # The seed is of the weights and of the order of samples.
                schedule = {"seed": seed, **each.pop("schedule", {})}
                layout = {"num_processes": WORLD_SIZE, **each.pop("layout", {})}
                specs[name] = compose_run(
                    starter, train=train, schedule=schedule, layout=layout, **each
                )
            for name, one in train_in_turns(specs, folder=Path(folder) / f"seed-{seed}").items():
                found.setdefault(name, []).append(one)
                rate = f"{one.label_tokens_per_s:.0f} label tokens/s"
                line = f"seed {seed}, {name}: {one.heldout_loss:.4f} nats, {rate}, {one.means}"
                print(line, file=sys.stderr, flush=True)
    return judge(found)


def train_in_turns(specs: Mapping[str, RunSpec], *, folder: Path) -> dict[str, Found]:
    """Train all specs at once on two ranks, a few steps of each in turn."""
    ranks = run_ranks(WORLD_SIZE, run_rank, specs=dict(specs), folder=folder)
    found = {}
    for name in specs:
        # A turn ends when its slower rank does.
        turns = [
            Turn(cpu_s=max(each.cpu_s for each in both), s=max(each.s for each in both))
            for both in zip(*(rank[name] for rank in ranks), strict=True)
        ]
        lines = RunFolder(folder / name).steps.read_text(encoding="utf-8").splitlines()
        found[name] = read_run([StepRecord.model_validate_json(line) for line in lines], turns)
    return found


def read_run(records: Sequence[StepRecord], turns: Sequence[Turn]) -> Found:
    """Put a run's log and the seconds of its turns together; the first and last are left out.

    Turns are as `_TurnTaker` ends them: the first one before step `STEPS_PER_TURN`.
    """
    counts = [
        sum(each.num_label_tokens for each in records if each.step // STEPS_PER_TURN == turn)
        for turn in range(1, len(turns) - 1)
    ]
    loss = records[-1].heldout_loss
    assert loss is not None, "it is measured after the last step"
    num_steps = len(records)
    return Found(
        heldout_loss=loss,
        turn_cpu_s=[turn.cpu_s for turn in turns[1:-1]],
        turn_s=[turn.s for turn in turns[1:-1]],
        turn_label_tokens=counts,
        means={
            "samples": round(sum(record.num_samples for record in records) / num_steps, 2),
            "padding": round(sum(record.padding_fraction for record in records) / num_steps, 4),
        },
    )


def run_rank(*, specs: dict[str, RunSpec], folder: Path) -> dict[str, list[Turn]]:
    """Train on one rank; return every run's turns."""
    import torch
    import torch.distributed as dist

    from diptych import worker
    from diptych.parallel.mesh import World

    world = World(rank=dist.get_rank(), size=WORLD_SIZE, device=torch.device("cpu"))
    turns = Turns(list(specs))
    takers = {name: _TurnTaker(name, turns=turns) for name in specs}

    def run(name: str) -> None:
        torch.set_num_threads(1)
        place = RunFolder(folder / name)
        place.path.mkdir(parents=True, exist_ok=True)
        takers[name].begin()
        worker.train_run(place, spec=specs[name], world=world)
        takers[name].end()

    # The loop asks once a step whether to stop; signals are the main thread's.
    def stop_request(place: RunFolder, **_: Any) -> _TurnTaker:
        return takers[place.path.name]

    with mock.patch.object(worker, "StopRequest", stop_request):
        turns.run({name: partial(run, name) for name in specs})
    return {name: taker.turns for name, taker in takers.items()}


class _TurnTaker:
    """Stands where the loop asks whether to stop: before the first step, and within each.

    It is asked in step k when the batch of step k+1 is there and step k is not yet computed. At
    every `STEPS_PER_TURN`-th step it hands over, and notes how long the turn took.
    """

    def __init__(self, name: str, *, turns: Turns) -> None:
        self.turns: list[Turn] = []
        self._name = name
        self._ring = turns
        self._num_asked = 0
        self._began = Turn(0.0, 0.0)

    def begin(self) -> None:
        self._began = Turn(time.process_time(), time.perf_counter())

    def end(self) -> None:
        cpu_s, s = time.process_time(), time.perf_counter()
        self.turns.append(Turn(cpu_s - self._began.cpu_s, s - self._began.s))

    def __call__(self) -> bool:
        """Never stop; hand over if it is time to."""
        if self._num_asked and self._num_asked % STEPS_PER_TURN == 0:
            self.end()
            self._ring.yield_turn(self._name)
            self.begin()
        self._num_asked += 1
        return False


def judge(found: Mapping[str, Sequence[Found]]) -> Measured:
    """Compare packed rows with the base's."""
    losses = {name: [one.heldout_loss for one in each] for name, each in found.items()}
    rates = {
        name: statistics.median(one.label_tokens_per_s for one in each)
        for name, each in found.items()
    }
    ratio = speedup(found[OURS], over=found[PEER])
    difference = statistics.mean(losses[OURS]) - statistics.mean(losses[PEER])
    noise = standard_error(losses[OURS], losses[PEER])
    near = {
        name: speedup(found[OURS][: len(each)], over=each)
        for name, each in found.items()
        if name != OURS
    }
    return Measured(
        unit="label tokens/processor s",
        ours=rates.pop(OURS),
        peers=rates,
        ratio=ratio,
        goal=f">= {MIN_SPEEDUP}, and held-out losses that differ by <= {MAX_NOISES:g} standard "
        "errors",
        met=ratio >= MIN_SPEEDUP and abs(difference) <= MAX_NOISES * noise,
        raw={
            "heldout_loss": losses,
            "difference": difference,
            "standard_error": noise,
            "speedup_over": near,
            "speedup_by_the_clock": speedup(found[OURS], over=found[PEER], clock="turn_s"),
            "means": {name: each[0].means for name, each in found.items()},
            "turns": {name: [vars(one) for one in each] for name, each in found.items()},
        },
    )


def speedup(
    ours: Sequence[Found],
    *,
    over: Sequence[Found],
    clock: Literal["turn_cpu_s", "turn_s"] = "turn_cpu_s",
) -> float:
    """Return the median, over all turns of all seeds, of one's rate by that of the other."""
    return statistics.median(
        mine / theirs
        for one, other in zip(ours, over, strict=True)
        for mine, theirs in zip(one.rates(clock=clock), other.rates(clock=clock), strict=True)
    )


def standard_error(one: Sequence[float], other: Sequence[float]) -> float:
    """Return that of the difference of two means."""
    return sum(statistics.variance(each) / len(each) for each in (one, other)) ** 0.5


if __name__ == "__main__":
    from run import main

    main(["pack_vs_bucket"])
