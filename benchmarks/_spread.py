"""What our loop costs per step on several ranks beyond a plain loop with the same layout.

In: a layout and its plain loop. Out: the figures. The loops are those of the benchmark `loop`, on
gloo ranks of one thread each: all loops live in the same processes and take turns of a few steps,
in the same order on every rank, so that whatever else the machine does meets all alike.

The plain loop averages over label tokens that it knows beforehand, which real batches do not allow;
`plain, counting labels` adds them up over the ranks in every step, as the Trainer does. Over gloo a
small collective that is waited for costs a millisecond or two, most of it one rank waiting for the
other; ours is under way while the step before computes.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from _ranks import run_ranks
from _turns import Turns
from _work import make_batches, make_model
from diptych.core.records import Layout
from diptych.data.collate import MicroBatch
from diptych.monitor.run_folder import RunFolder
from diptych.parallel.mesh import World
from diptych.train.step import LossModule
from diptych.worker import StopRequest
from loop import (
    CHECKPOINT_EVERY,
    GOAL,
    NUM_ROUNDS,
    NUM_STEPS,
    OPTIMIZER,
    Batches,
    MeanLoss,
    Round,
    Stamped,
    check_equal_work,
    checkpoint_extra,
    handlers_kept,
    make_optimizer,
    quiet,
    run_ours,
    steps_between,
    turn_medians,
)
from run import Measured

WORLD_SIZE = 2
Wrap = Callable[[MeanLoss], nn.Module]
"""Spreads a plain loop's module as the layout says."""


def measure_loops(layout: Layout, *, wrap: Wrap) -> Measured:
    """Run all loops on the ranks of a layout and compare them; `wrap` is the plain loop's."""
    ranks = run_ranks(WORLD_SIZE, run_rounds, layout=layout, wrap=wrap)
    for rounds in ranks:
        check_equal_work(rounds)
    # A step ends when its slower rank does.
    return judge(
        [
            {
                name: replace(one, step_s=np.maximum(one.step_s, other[name].step_s))
                for name, one in found.items()
            }
            for found, other in zip(*ranks, strict=True)
        ]
    )


def run_rounds(*, layout: Layout, wrap: Wrap) -> list[dict[str, Round]]:
    """Run on one rank; the first round warms up, and is left out."""
    world = World(rank=dist.get_rank(), size=WORLD_SIZE, device=torch.device("cpu"))
    batches = make_batches()[world.rank :: WORLD_SIZE]
    return [
        run_round(batches, number=number, layout=layout, world=world, wrap=wrap)
        for number in range(NUM_ROUNDS + 1)
    ][1:]


def run_round(
    batches: list[MicroBatch], *, number: int, layout: Layout, world: World, wrap: Wrap
) -> dict[str, Round]:
    """Run every loop once from the same weights, in turns; who follows whom differs by round."""
    names = ["ours", "plain", "plain, counting labels", "trainer", "plain again"]
    random.Random(number).shuffle(names)
    turns = Turns(names)
    stamped = {
        name: Stamped(
            LossModule(make_model()), yield_turn=functools.partial(turns.yield_turn, name)
        )
        for name in names
    }
    gc.collect()
    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as mine, quiet():
        folder = Path(shared(mine))
        with handlers_kept():
            stop_requested = StopRequest(RunFolder(folder / "ours"), world=world)
        runs: dict[str, Callable[[str], None]] = {
            "ours": lambda name: run_ours(
                stamped[name],
                batches=batches,
                folder=folder / name,
                stop_requested=stop_requested,
                layout=layout,
                world=world,
            ),
            "trainer": lambda name: run_trainer(
                stamped[name],
                batches=batches,
                folder=folder / name,
                wrap=None if layout.engine == "ddp" else wrap,
            ),
        }

        def loop(name: str) -> Callable[[], None]:
            def run() -> None:
                torch.set_num_threads(1)
                if name in runs:
                    runs[name](name)
                else:
                    counting = name == "plain, counting labels"
                    run_plain(stamped[name], batches=batches, wrap=wrap, counting=counting)

            return run

        turns.run({name: loop(name) for name in names})
        dist.barrier()
    return {name: stamped[name].round() for name in names}


def shared(folder: str) -> str:
    """Return the first rank's folder on every rank."""
    found: list[Any] = [folder]
    dist.broadcast_object_list(found)
    return found[0]


def run_plain(stamped: Stamped, *, batches: list[MicroBatch], wrap: Wrap, counting: bool) -> None:
    """Train with the shortest loop that does the same; count label tokens over ranks or not."""
    model = wrap(MeanLoss(stamped))
    optimizer, scheduler = make_optimizer(stamped.module.model)
    model.train()
    for inputs in Batches(batches):
        loss = model(**inputs)["loss"]
        if counting:
            total = inputs["num_label_tokens"].double()
            dist.all_reduce(total)
            loss = loss * (inputs["num_label_tokens"] * WORLD_SIZE / total)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)


def run_trainer(
    stamped: Stamped, *, batches: list[MicroBatch], folder: Path, wrap: Wrap | None
) -> None:
    """Train with the Hugging Face Trainer, logging every step.

    Without `wrap` it spreads the module itself, by DDP, with all that it does among ranks. It
    cannot shard on a CPU: with `wrap` it gets a module that is sharded already, is not told of the
    other ranks, and gathers nothing over them. It writes no checkpoints.
    """
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(train_dataset or self.train_dataset)

    if wrap is None:
        rank = str(dist.get_rank())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(WORLD_SIZE))
        # Asked for, and not used: the ranks have met.
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    model = MeanLoss(stamped)
    trainer = InOrder(
        model=model if wrap is None else wrap(model),
        args=TrainingArguments(
            output_dir=str(folder / str(dist.get_rank())),
            max_steps=NUM_STEPS,
            per_device_train_batch_size=1,
            max_grad_norm=OPTIMIZER.max_grad_norm,
            use_cpu=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            report_to="none",
            seed=0,
            logging_steps=1,
            save_strategy="no",
            ddp_backend="gloo",
            ddp_broadcast_buffers=False,
            ddp_find_unused_parameters=False,
        ),
        train_dataset=EveryRanksBatches(),
        data_collator=lambda examples: examples[0],
        optimizers=make_optimizer(stamped.module.model),
    )
    trainer.train()


class EveryRanksBatches(Batches):
    """The batches of all ranks in turn, which the Trainer deals out."""

    def __init__(self) -> None:
        super().__init__(make_batches())

    def __len__(self) -> int:
        return NUM_STEPS * WORLD_SIZE

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if number >= len(self):
            raise IndexError(number)
        return self._inputs[number % len(self._inputs)]


def judge(rounds: list[dict[str, Round]]) -> Measured:
    """Compare what the loops add to a plain step."""
    steps = {name: [1e3 * found[name].step_s for found in rounds] for name in rounds[0]}
    turns = {name: np.concatenate([turn_medians(one) for one in steps[name]]) for name in steps}
    # The same loop runs twice; its mean is the floor, so that neither run's luck decides.
    floor = (turns["plain"] + turns["plain again"]) / 2
    plain = float(np.median(floor))
    added = {name: float(np.median(turns[name] - floor)) for name in turns}
    checkpoint = float(np.median([checkpoint_extra(one) for one in steps["ours"]]))
    with_checkpoints = added["ours"] + checkpoint / steps_between(plain)
    ratio = added["ours"] / added["trainer"]
    return Measured(
        unit="ms/step",
        ours=plain + added["ours"],
        peers={name: plain + more for name, more in added.items() if name != "ours"},
        ratio=ratio,
        goal=f"(ours - plain) / (trainer - plain) <= {GOAL}",
        met=ratio <= GOAL,
        raw={
            "plain_ms": plain,
            "added_ms": added,
            "of_the_plain_step": added["ours"] / plain,
            "of_the_plain_step_beyond_counting_labels": (
                added["ours"] - added["plain, counting labels"]
            )
            / plain,
            "of_the_plain_step_with_checkpoints": with_checkpoints / plain,
            "checkpoint_ms": checkpoint,
            "steps_between_checkpoints": steps_between(plain),
            "checkpoint_every": CHECKPOINT_EVERY,
            "turn_ms": {name: np.round(found, 3).tolist() for name, found in turns.items()},
            "num_steps": NUM_STEPS,
            "num_ranks": WORLD_SIZE,
        },
    )
