"""What a training loop costs per step beyond the model's own work.

Peers: a plain PyTorch loop (the floor), the Hugging Face Trainer, Lightning. All train the same
small model from the same weights on the same batches in memory, with the same AdamW, clipping and
learning rate, on one thread of one process; the losses of every step must agree. Ours has on what
it has on by default: a log of every step, checkpoints, stop requests, per-step seeds, clipping,
schedule. The Trainer and Lightning do the same: they log every step and write checkpoints as often.
The goal is about what our loop adds over what the Trainer adds. Beside it stands the Trainer with
its own defaults, which in these few steps logs nothing and writes nothing.

The loops take turns of `TURN` steps, so that whatever else the machine does meets all alike. A
step's time is that between two forwards, so it holds everything a loop does. What a loop adds is
the median, over turns, of its median step less the plain loops' in the same turn; a checkpoint's
extra time is measured apart and shared over the steps between two, of which our defaults (so many
steps, but not before so many seconds) ask at this step time; the peers are taken to save as often.
The plain loop runs twice: the mean of both is the floor, what each adds to it is the noise.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import math
import os
import random
import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from _turns import Turns
from _work import NUM_BATCHES, make_batches, make_model
from diptych.core.records import Layout, OptimizerSpec, StepRecord
from diptych.data.collate import MicroBatch
from diptych.data.loader import StepBatch
from diptych.model.families import units
from diptych.monitor.run_folder import RunFolder, StepLog
from diptych.parallel.mesh import World
from diptych.parallel.spread import spread
from diptych.train.checkpoints import Checkpoints
from diptych.train.compose import TrainParams
from diptych.train.heldout import HeldoutLoss
from diptych.train.loop import Hooks, LoopSettings, TrainState, train
from diptych.train.optimizers import build_optimizer
from diptych.train.retention import Keep
from diptych.train.schedules import learning_rate
from diptych.train.step import LossModule
from diptych.worker import StopRequest
from run import Measured

GOAL = 0.10
NUM_ROUNDS = 6
NUM_STEPS = 330
TURN = 10
NUM_WARMUP_TURNS = 2
CHECKPOINT_EVERY = TrainParams().checkpoint_every_steps
CHECKPOINT_MIN_INTERVAL_S = TrainParams().checkpoint_min_interval_s
OPTIMIZER = OptimizerSpec(warmup_steps=20)
WORLD = World(rank=0, size=1, device=torch.device("cpu"))


@dataclass(frozen=True)
class Round:
    """One run of one peer.

    Attributes:
        step_s: [NUM_STEPS - 1] seconds from one forward to the next.
        cpu_s: [NUM_STEPS - 1] seconds of the loop's thread on a core, in the same time.
        losses: [NUM_STEPS] the summed loss of every step.
    """

    step_s: np.ndarray
    cpu_s: np.ndarray
    losses: np.ndarray


class Stamped(nn.Module):
    """Notes when each forward begins and what it returned; hands over between turns."""

    def __init__(self, module: nn.Module, *, yield_turn: Callable[[], None]) -> None:
        super().__init__()
        self.module = module
        self._yield_turn = yield_turn
        self._seconds: list[tuple[float, float]] = []
        self._losses: list[torch.Tensor] = []
        self._began = (0.0, 0.0)

    def forward(self, **inputs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss, whole and by source."""
        if self._losses:
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            self._seconds.append((wall_s - self._began[0], cpu_s - self._began[1]))
        if len(self._losses) % TURN == 0:
            self._yield_turn()
        self._began = (time.perf_counter(), time.thread_time())
        loss, by_source = self.module(**inputs)
        self._losses.append(loss.detach())
        return loss, by_source

    def round(self) -> Round:
        """Collect what was noted."""
        step_s, cpu_s = np.array(self._seconds).T
        return Round(step_s, cpu_s, torch.stack(self._losses).double().numpy())


class MeanLoss(nn.Module):
    """The model as the peers want it: a mean over label tokens, under the name `loss`."""

    def __init__(self, stamped: Stamped) -> None:
        super().__init__()
        self.stamped = stamped

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        position_ids: torch.Tensor,
        pixel_values: torch.Tensor,
        grid_thw: torch.Tensor,
        num_label_tokens: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Return {'loss': the mean}."""
        loss, _ = self.stamped(
            input_ids=input_ids,
            labels=labels,
            position_ids=position_ids,
            pixel_values=pixel_values,
            grid_thw=grid_thw,
            source_ids=torch.zeros_like(labels, dtype=torch.int16),
        )
        return {"loss": loss / num_label_tokens}


def measure(options: argparse.Namespace) -> Measured:
    """Run all loops `NUM_ROUNDS` times; the first round warms caches, allocators and imports."""
    torch.set_num_threads(1)
    batches = make_batches()
    rounds = [run_round(batches, number=number) for number in range(NUM_ROUNDS + 1)][1:]
    check_equal_work(rounds)
    return judge(rounds)


def run_round(batches: list[MicroBatch], *, number: int) -> dict[str, Round]:
    """Run every loop once from the same weights, in turns; who follows whom differs by round."""
    names = [*LOOPS]
    random.Random(number).shuffle(names)
    turns = Turns(names)
    stamped = {
        name: Stamped(
            LossModule(make_model()),
            yield_turn=functools.partial(turns.yield_turn, name),
        )
        for name in names
    }
    gc.collect()
    with (
        tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder,
        quiet(),
    ):
        with handlers_kept():
            stop_requested = StopRequest(RunFolder(Path(folder, "ours")), world=WORLD)

        def loop(name: str) -> Callable[[], None]:
            extra = {"stop_requested": stop_requested} if name == "ours" else {}

            def run() -> None:
                torch.set_num_threads(1)
                LOOPS[name](stamped[name], batches=batches, folder=Path(folder, name), **extra)

            return run

        turns.run({name: loop(name) for name in names})
    return {name: stamped[name].round() for name in names}


def run_ours(
    stamped: Stamped,
    *,
    batches: list[MicroBatch],
    folder: Path,
    stop_requested: Callable[[], bool],
    layout: Layout = Layout(),  # noqa: B008 - frozen
    world: World = WORLD,
) -> None:
    """Train with our loop as a rank does, with its step log, checkpoints and stop requests."""
    folder.mkdir(exist_ok=True)
    run_folder = RunFolder(folder)
    model = stamped.module.model
    engine = spread(
        stamped,
        model=model,
        units=units(model),
        layout=layout,
        world=world,
        build_optimizer=functools.partial(build_optimizer, spec=OPTIMIZER),
    )
    folder = run_folder.checkpoints
    names = {"identity_sha256": "", "schedule_sha256": "", "keep": Keep(last=2), "saving": "auto"}
    checkpoints = Checkpoints(folder, engine=engine, world=world, **names)
    log = StepLog(run_folder.steps) if world.is_first else None

    def record(step: StepRecord) -> None:
        if log is not None:
            log.write(step)

    train(
        step_batches(batches),
        engine=engine,
        state=TrainState(),
        settings=LoopSettings(
            num_steps=NUM_STEPS,
            seed=0,
            optimizer=OPTIMIZER,
            checkpoint_every_steps=CHECKPOINT_EVERY,
            # Measuring held-out loss is work that no peer does here.
            heldout_every_steps=0,
            sources=("one",),
        ),
        hooks=Hooks(
            record=record,
            saves=checkpoints,
            heldout=lambda: HeldoutLoss(None, ()),
            stop_requested=stop_requested,
        ),
        world=world,
    )
    checkpoints.close()
    if log is not None:
        log.close()


def run_plain(stamped: Stamped, *, batches: list[MicroBatch], folder: Path) -> None:
    """Train with the shortest loop that does the same."""
    model = MeanLoss(stamped)
    optimizer, scheduler = make_optimizer(stamped.module.model)
    model.train()
    for inputs in Batches(batches):
        loss = model(**inputs)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)


def run_trainer(
    stamped: Stamped, *, batches: list[MicroBatch], folder: Path, **duties: Any
) -> None:
    """Train with the Hugging Face Trainer; `duties` are further training arguments."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(train_dataset or self.train_dataset)

    trainer = InOrder(
        model=MeanLoss(stamped),
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=NUM_STEPS,
            per_device_train_batch_size=1,
            max_grad_norm=OPTIMIZER.max_grad_norm,
            use_cpu=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            report_to="none",
            seed=0,
            **duties,
        ),
        train_dataset=Batches(batches),
        data_collator=lambda examples: examples[0],
        optimizers=make_optimizer(stamped.module.model),
    )
    trainer.train()


def run_trainer_alike(stamped: Stamped, *, batches: list[MicroBatch], folder: Path) -> None:
    """Train with the Hugging Face Trainer, asked for what our loop does by default."""
    run_trainer(
        stamped,
        batches=batches,
        folder=folder,
        logging_steps=1,
        save_steps=CHECKPOINT_EVERY,
        save_total_limit=2,
    )


def run_lightning(stamped: Stamped, *, batches: list[MicroBatch], folder: Path) -> None:
    """Train with Lightning, asked for what our loop does by default."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = MeanLoss(stamped)

        def training_step(self, inputs: dict[str, torch.Tensor], number: int) -> torch.Tensor:
            loss = self.model(**inputs)["loss"]
            self.log("loss", loss, prog_bar=True, batch_size=1)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer, scheduler = make_optimizer(stamped.module.model)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    trainer = lightning.Trainer(
        max_steps=NUM_STEPS,
        accelerator="cpu",
        devices=1,
        log_every_n_steps=1,
        gradient_clip_val=OPTIMIZER.max_grad_norm,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(every_n_train_steps=CHECKPOINT_EVERY)],
    )
    trainer.fit(Module(), DataLoader(Batches(batches), batch_size=None))


def make_optimizer(
    model: nn.Module,
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Build the peers' optimizer and schedule: ours, as a torch scheduler."""
    optimizer = build_optimizer(model, spec=OPTIMIZER)

    def fraction(step: int) -> float:
        return learning_rate(step, spec=OPTIMIZER, num_steps=NUM_STEPS) / OPTIMIZER.lr

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, fraction)


class Batches(torch.utils.data.Dataset):
    """`NUM_STEPS` batches as keyword arguments, the same few over and over."""

    def __init__(self, batches: list[MicroBatch]) -> None:
        self._inputs = [
            {
                "input_ids": batch.input_ids_BS,
                "labels": batch.labels_BS,
                "position_ids": batch.position_ids_3BS,
                "pixel_values": batch.pixel_values_PD,
                "grid_thw": batch.grid_thw_I3,
                "num_label_tokens": torch.tensor(batch.num_label_tokens),
            }
            for batch in batches
        ]

    def __len__(self) -> int:
        return NUM_STEPS

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        if step >= NUM_STEPS:
            raise IndexError(step)
        return self._inputs[step % len(self._inputs)]


def step_batches(batches: list[MicroBatch]) -> Iterator[StepBatch]:
    """Yield the same batches as our loader would."""
    for step in range(NUM_STEPS):
        batch = batches[step % len(batches)]
        yield StepBatch(
            step=step,
            epoch=0,
            number=step,
            micro_batches=[batch],
            rows=[],
            masked_keys=(),
            cost=1.0,
        )


def check_equal_work(rounds: list[dict[str, Round]]) -> None:
    """Refuse figures of loops that did not train alike: every loss within 1e-4 relative."""
    expected = rounds[0]["plain"].losses
    for found in rounds:
        for name, one in found.items():
            assert len(one.losses) == NUM_STEPS, f"{name} took {len(one.losses)} steps"
            worst = float(np.abs(one.losses / expected - 1).max())
            assert worst <= 1e-4, f"a loss of {name} differs from the plain loop's by {worst:.1e}"
    assert expected[-NUM_BATCHES:].sum() < expected[:NUM_BATCHES].sum(), "nothing was learnt"


def judge(rounds: list[dict[str, Round]]) -> Measured:
    """Compare what the loops add, by the clock; the CPU's time is kept beside it."""
    wall, cpu = compare(rounds, clock="step_s"), compare(rounds, clock="cpu_s")
    return Measured(
        unit="ms/step",
        ours=wall["step_ms"]["ours"],
        peers={name: value for name, value in wall["step_ms"].items() if name != "ours"},
        ratio=wall["ratio"],
        goal=f"(ours - plain) / (trainer - plain) <= {GOAL}",
        met=wall["ratio"] <= GOAL,
        raw={
            "wall": wall,
            "cpu": cpu,
            "steps_between_checkpoints": steps_between(wall["step_ms"]["plain"]),
            "num_steps": NUM_STEPS,
            "last_loss": {name: one.losses[-1] for name, one in rounds[0].items()},
        },
    )


def compare(rounds: list[dict[str, Round]], *, clock: str) -> dict[str, Any]:
    """Return what every loop adds to the plain one in ms, with checkpoints and without."""
    steps = {name: [1e3 * getattr(found[name], clock) for found in rounds] for name in LOOPS}
    turns = {name: np.concatenate([turn_medians(one) for one in steps[name]]) for name in LOOPS}
    # The same loop runs twice; its mean is the floor, so that neither run's luck decides.
    floor = (turns["plain"] + turns["plain again"]) / 2
    plain = float(np.median(floor))
    bare = {name: float(np.median(turns[name] - floor)) for name in LOOPS}
    checkpoint = {
        name: statistics.median(checkpoint_extra(one) for one in steps[name])
        for name in LOOPS
        if name in ("ours", "trainer", "lightning")
    }
    between = steps_between(plain)
    added = {name: bare[name] + checkpoint.get(name, 0.0) / between for name in bare}
    return {
        "ratio": added["ours"] / added["trainer"],
        "ratio_without_checkpoints": bare["ours"] / bare["trainer"],
        "ratio_to_trainer_defaults": added["ours"] / added["trainer defaults"],
        "step_ms": {name: plain + more for name, more in added.items()},
        "added_ms": added,
        "added_without_checkpoints_ms": bare,
        "checkpoint_ms": checkpoint,
        "turn_ms": {name: np.round(found, 3).tolist() for name, found in turns.items()},
    }


def steps_between(step_ms: float) -> int:
    """Count the steps from one checkpoint to the next by our defaults; the peers save as often."""
    return max(CHECKPOINT_EVERY, math.ceil(1e3 * CHECKPOINT_MIN_INTERVAL_S / step_ms))


def turn_medians(steps: np.ndarray) -> np.ndarray:
    """Return the median step of every turn, but for the first turns."""
    whole = steps[: len(steps) // TURN * TURN].reshape(-1, TURN)
    return np.median(whole[NUM_WARMUP_TURNS:], axis=1)


def checkpoint_extra(steps: np.ndarray) -> float:
    """Return what a checkpoint adds to the step that writes it."""
    return float(np.median(steps[CHECKPOINT_EVERY - 1 :: CHECKPOINT_EVERY]) - np.median(steps))


LOOPS: dict[str, Callable[..., None]] = {
    "ours": run_ours,
    "plain": run_plain,
    "trainer": run_trainer_alike,
    "trainer defaults": run_trainer,
    "lightning": run_lightning,
    "plain again": run_plain,
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Send what peers print to nowhere; they still make it."""
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Put the signal handlers back that a rank sets for itself."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    from run import main

    main(["loop"])
