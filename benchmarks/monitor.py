"""What observing a run adds to a training step: everything on at default rates, against nothing.

On are the sampler of this node, the alerts, wandb offline and TensorBoard, as a rank has them; the
step log is always written. One loop trains a model of the starter run's size; whole turns of `TURN`
steps are observed or not, in turns, so that whatever else the machine does meets both alike. Two
seconds of a turn go by before a step counts: what the turn before left to threads is done by then.
Records are as full as those of a run on devices, with phases, memory and gradients by tower.

The share is that of the clock: the median, over neighbouring turns, of how much longer the median
step takes. Beside it stands the CPU time of all threads, and of wandb's own process, a step.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch

from _work import IMAGE, TOKENS, make_batches
from diptych.core.records import (
    Buckets,
    Identity,
    Layout,
    ModelSpec,
    ObserveSpec,
    Over,
    Placement,
    Provenance,
    RunSpec,
    ScheduleSpec,
    StepRecord,
)
from diptych.data.collate import MicroBatch
from diptych.data.loader import StepBatch
from diptych.model.assemble import build
from diptych.model.families import units
from diptych.monitor.observer import Observer, open_observer
from diptych.monitor.run_folder import RunFolder, StepLog
from diptych.monitor.sampler import Sampler, start_sampler
from diptych.parallel.spread import spread
from diptych.train.checkpoints import Checkpoints
from diptych.train.heldout import HeldoutLoss
from diptych.train.loop import Hooks, LoopSettings, TrainState, train
from diptych.train.optimizers import build_optimizer
from diptych.train.retention import Keep
from diptych.train.step import LossModule
from loop import OPTIMIZER, WORLD, quiet
from run import Measured

GOAL = 0.01
TURN_S, SETTLE_S, NUM_TURNS = 10.0, 2.0, 24
OBSERVE = ObserveSpec(sinks=("wandb", "tensorboard"))
SPEC = RunSpec(
    identity=Identity(
        manifest_sha256="",
        processor_sha256="",
        model=ModelSpec(),
        schedule=ScheduleSpec(),
        buckets=Buckets(areas_px=(), aspects=()),
        optimizer=OPTIMIZER,
        num_steps=1,
        seed=0,
    ),
    placement=Placement(
        layout=Layout(),
        num_workers=0,
        threads_per_rank=1,
        log_every_steps=1,
        checkpoint_every_steps=0,
        checkpoint_min_interval_s=0.0,
        keep_checkpoints=1,
        heldout_every_steps=0,
        heldout_max_samples=0,
        max_restarts=0,
        shards="",
        manifest="",
        sample_costs="",
        processor="",
        observe=OBSERVE,
    ),
    provenance=Provenance(git_commit=None, git_dirty=None, source_sha256="", versions={}),
)
NUM_MICRO_BATCHES = 8
MODEL = ModelSpec(
    sizes={
        "text": {
            "vocab_size": 256,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
        },
        "vision": {
            "depth": 4,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_heads": 4,
            "patch_size": 8,
            "temporal_patch_size": 1,
            "deepstack_visual_indexes": [1],
            "num_position_embeddings": 64,
        },
    },
    tie_word_embeddings=False,
)
PHASES = ("data", "place", "forward", "backward", "communication", "update", "other")


@dataclass
class Turn:
    """The steps of one turn, once it has settled."""

    observed: bool
    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    wandb_cpu_s: float = 0.0


class Bench:
    """Switches observing on and off, and times the steps between records."""

    def __init__(self, folder: RunFolder) -> None:
        self.turns: list[Turn] = []
        self._folder = folder
        self._log = StepLog(folder.steps)
        self._observer: Observer = open_observer(folder, spec=SPEC, attempt=0, step=0)
        self._sampler: Sampler | None = None
        self._began_s = self._wandb_s = 0.0
        self._last = (0.0, 0.0)

    def stop_requested(self) -> bool:
        """End the loop after its last turn."""
        return len(self.turns) == NUM_TURNS and self._is_over()

    def record(self, record: StepRecord) -> None:
        """Take a step as a rank does; between turns, switch."""
        full = record.model_copy(update=fill_up(record))
        self._log.write(full)
        if not self.turns or (self._is_over() and len(self.turns) < NUM_TURNS):
            self._switch()
        turn = self.turns[-1]
        if turn.observed:
            self._observer.record(full)
        now_s, cpu_s = time.perf_counter(), time.process_time()
        if time.perf_counter() - self._began_s > SETTLE_S:
            turn.step_s.append(now_s - self._last[0])
            turn.cpu_s.append(cpu_s - self._last[1])
        self._last = (now_s, cpu_s)

    def close(self) -> None:
        """End what was begun."""
        if self._sampler is not None:
            self._sampler.close()
        self._observer.close()
        self._log.close()

    def _is_over(self) -> bool:
        return time.perf_counter() - self._began_s > TURN_S

    def _switch(self) -> None:
        if self.turns:
            self.turns[-1].wandb_cpu_s = wandb_cpu_s() - self._wandb_s
        turn = Turn(observed=bool(self.turns) and not self.turns[-1].observed)
        if turn.observed:
            self._sampler = start_sampler(
                self._folder.samples,
                node="here",
                attempt=0,
                every_s=OBSERVE.sample_every_s,
                pids=[os.getpid()],
                devices=[],
            )
        elif self._sampler is not None:
            self._sampler.close()
            self._sampler = None
        self.turns.append(turn)
        self._began_s, self._wandb_s = time.perf_counter(), wandb_cpu_s()
        self._last = (time.perf_counter(), time.process_time())


def measure(options: argparse.Namespace) -> Measured:
    """Train for `NUM_TURNS` turns; the first two warm up."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="diptych-monitor-") as name, quiet():
        bench = Bench(RunFolder(Path(name)))
        try:
            run(bench, folder=Path(name))
        finally:
            bench.close()
        files = [path for path in Path(name).rglob("*") if path.is_file()]
        written = {path.suffix or path.name[:6]: path.stat().st_size for path in files}
    return judge(bench.turns[2:], written=written)


def run(bench: Bench, *, folder: Path) -> None:
    """Train as a rank does, without checkpoints."""
    model = build(MODEL, tokens=TOKENS, image=IMAGE, seed=0)
    engine = spread(
        LossModule(model),
        model=model,
        units=units(model),
        layout=Layout(),
        world=WORLD,
        build_optimizer=functools.partial(build_optimizer, spec=OPTIMIZER),
    )
    names: dict[str, Any] = {"identity_sha256": "", "schedule_sha256": "", "saving": "sync"}
    checkpoints = Checkpoints(
        folder / "checkpoints", engine=engine, world=WORLD, keep=Keep(last=1), **names
    )
    train(
        endless(make_batches()),
        engine=engine,
        state=TrainState(),
        settings=LoopSettings(
            num_steps=10**6,
            seed=0,
            optimizer=OPTIMIZER,
            checkpoint_every_steps=0,
            heldout_every_steps=0,
            sources=("one",),
        ),
        hooks=Hooks(
            record=bench.record,
            saves=checkpoints,
            heldout=lambda: HeldoutLoss(None, ()),
            stop_requested=bench.stop_requested,
        ),
        world=WORLD,
    )
    checkpoints.close()


def endless(batches: list[MicroBatch]) -> Iterator[StepBatch]:
    """Yield the same batch over and over, as our loader would."""
    step = 0
    while True:
        yield StepBatch(
            step=step,
            epoch=0,
            number=step,
            micro_batches=batches[:NUM_MICRO_BATCHES],
            rows=[],
            masked_keys=(),
            cost=1.0,
        )
        step += 1


def fill_up(record: StepRecord) -> dict[str, Any]:
    """Make the fields that a run on several devices has, too."""
    part_s = record.step_s / len(PHASES)
    over = Over(0.9 * part_s, part_s, 1.1 * part_s, record.step % 8)
    size = Over(2e10, 2e10, 2.1e10, record.step % 8)
    return {
        "time_s": time.time(),
        "phases_s": dict.fromkeys(PHASES, over),
        "grad_norm_by_tower": dict.fromkeys(("vision", "connector", "language", "head"), 0.5),
        "memory_bytes": dict.fromkeys(("allocated", "reserved", "peak", "host"), size),
        "model_flops": 1e12,
        "hardware_flops": 1.3e12,
        "mfu": 0.4,
        "hfu": 0.5,
        "num_alloc_retries": 0,
    }


def wandb_cpu_s() -> float:
    """Return the CPU seconds of wandb's own process so far."""
    used_s = 0.0
    for child in psutil.Process().children(recursive=True):
        if "wandb-core" in child.name():
            times = child.cpu_times()
            used_s += times.user + times.system
    return used_s


def judge(turns: list[Turn], *, written: dict[str, int]) -> Measured:
    """Compare each observed turn with the one before it."""
    off, on = turns[::2], turns[1::2]
    assert all(turn.observed for turn in on), "turns alternate"
    assert not any(turn.observed for turn in off), "turns alternate"
    wall_ms = [[1e3 * statistics.median(each.step_s) for each in side] for side in (off, on)]
    cpu_ms = [[1e3 * statistics.fmean(each.cpu_s) for each in side] for side in (off, on)]
    share = statistics.median(b / a - 1 for a, b in zip(*wall_ms, strict=True))
    # Neighbours that are both unobserved say what the noise is.
    noise = statistics.median(abs(b / a - 1) for a, b in pairwise(wall_ms[0]))
    wandb_ms = [1e3 * each.wandb_cpu_s / (TURN_S / statistics.fmean(each.step_s)) for each in on]
    return Measured(
        unit="ms/step",
        ours=statistics.median(wall_ms[1]),
        peers={"not observed": statistics.median(wall_ms[0])},
        ratio=share,
        goal=f"observed / not observed - 1 <= {GOAL}",
        met=share <= GOAL,
        raw={
            "wall_ms": dict(zip(("off", "on"), wall_ms, strict=True)),
            "noise": noise,
            "cpu_ms": dict(zip(("off", "on"), cpu_ms, strict=True)),
            "added_cpu_ms": statistics.median(b - a for a, b in zip(*cpu_ms, strict=True)),
            "wandb_process_cpu_ms": statistics.median(wandb_ms),
            "steps": [len(each.step_s) for each in turns],
            "bytes_by_suffix": written,
        },
    )


if __name__ == "__main__":
    from run import main

    main(["monitor"])
