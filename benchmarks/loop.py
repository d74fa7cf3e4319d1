"""What a training loop costs per step beyond the model's own work.

Peers: a plain PyTorch loop (the floor), the Hugging Face Trainer, Lightning. All train the same
small model from the same weights on the same batches in memory, with the same AdamW, clipping and
learning rate, in one process, interleaved; the losses of every step must agree. Ours has on what it
has on by default: step log, checkpoints, stop requests, per-step seeds, clipping, schedule. The
peers have on what they have on by default; within the steps measured here they write no checkpoint,
which favours them. The goal is about what we add over what the Trainer adds.

A step's time is that between two forwards, so it holds everything a loop does. The figure of a
round is the median of its steps, plus a checkpoint's extra time shared over the steps between two.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
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
from run import Measured
from torch import nn

from diptych.core.records import ImageSettings, ModelSpec, OptimizerSpec, StepRecord, TokenIds
from diptych.data.collate import MicroBatch
from diptych.data.loader import StepBatch
from diptych.model.assemble import build
from diptych.monitor.run_folder import RunFolder, StepLog
from diptych.parallel.engine import spread
from diptych.parallel.mesh import World
from diptych.shape.families import family
from diptych.train.checkpoints import Checkpoints
from diptych.train.compose import TrainParams
from diptych.train.loop import Hooks, LoopSettings, TrainState, train
from diptych.train.optimizers import build_optimizer, learning_rate
from diptych.train.step import LossModule

GOAL = 0.10
NUM_ROUNDS = 7
NUM_STEPS = 250
NUM_WARMUP = 20
NUM_BATCHES = 16
CHECKPOINT_EVERY = TrainParams().checkpoint_every_steps
OPTIMIZER = OptimizerSpec(warmup_steps=20)
IMAGE = ImageSettings(patch_px=8, merge=2, temporal_patch=1, min_area_px=256, max_area_px=4096)
TOKENS = TokenIds(
    num_tokens=256, pad=0, eos=1, image=2, video=3, vision_start=4, vision_end=5
)
MODEL = ModelSpec(
    sizes={
        "text": {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
        },
        "vision": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "patch_size": 8,
            "temporal_patch_size": 1,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 64,
        },
    },
    tie_word_embeddings=False,
)


@dataclass(frozen=True)
class Round:
    """One run of one peer: seconds between forwards, and the summed loss of every step."""

    step_s: np.ndarray
    losses: np.ndarray


class Stamped(nn.Module):
    """Notes when each forward begins and what it returned; the same in every peer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.times: list[float] = []
        self.losses: list[torch.Tensor] = []

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Return the summed loss."""
        self.times.append(time.perf_counter())
        loss = self.module(**inputs)
        self.losses.append(loss.detach())
        return loss

    def round(self) -> Round:
        """Collect what was noted."""
        return Round(np.diff(self.times), torch.stack(self.losses).double().numpy())


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
        loss = self.stamped(
            input_ids=input_ids,
            labels=labels,
            position_ids=position_ids,
            pixel_values=pixel_values,
            grid_thw=grid_thw,
        )
        return {"loss": loss / num_label_tokens}


def measure(options: argparse.Namespace) -> Measured:
    """Run every peer in turn, `NUM_ROUNDS` times, each time in another order."""
    peers: dict[str, Callable[..., None]] = {
        "ours": run_ours,
        "plain": run_plain,
        "trainer": run_trainer,
        "lightning": run_lightning,
    }
    torch.set_num_threads(1)
    batches = make_batches()
    model = build(MODEL, tokens=TOKENS, image=IMAGE, seed=0)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rounds: dict[str, list[Round]] = {name: [] for name in peers}
    names = list(peers)
    for number in range(NUM_ROUNDS + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found = run_round(peers[name], model=model, weights=weights, batches=batches)
            # The first round warms caches, allocators and imports.
            if number:
                rounds[name].append(found)
    check_equal_work(rounds)
    return judge(rounds)


def run_round(
    run: Callable[..., None],
    *,
    model: nn.Module,
    weights: dict[str, torch.Tensor],
    batches: list[MicroBatch],
) -> Round:
    """Run one peer from the first weights, in a folder of its own, without its console output."""
    model.load_state_dict(weights)
    model.zero_grad(set_to_none=True)
    stamped = Stamped(LossModule(model))
    torch.manual_seed(0)
    gc.collect()
    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder, quiet():
        run(stamped, batches=batches, folder=Path(folder))
    return stamped.round()


def run_ours(stamped: Stamped, *, batches: list[MicroBatch], folder: Path) -> None:
    """Train with our loop as a rank does, with its step log, checkpoints and stop requests."""
    from diptych.core.records import Layout
    from diptych.worker import StopRequest

    run_folder = RunFolder(folder)
    world = World(rank=0, size=1, device=torch.device("cpu"))
    model = stamped.module.model
    engine = spread(stamped, units=(), layout=Layout(), world=world)
    optimizer = build_optimizer(model, spec=OPTIMIZER)
    checkpoints = Checkpoints(
        run_folder.checkpoints, identity_sha256="", schedule_sha256="", keep=2, world=world
    )
    log = StepLog(run_folder.steps)

    def record(step: StepRecord) -> None:
        log.write(step)

    with handlers_kept():
        train(
            step_batches(batches),
            engine=engine,
            optimizer=optimizer,
            state=TrainState(),
            settings=LoopSettings(
                num_steps=NUM_STEPS,
                seed=0,
                optimizer=OPTIMIZER,
                checkpoint_every_steps=CHECKPOINT_EVERY,
                # Measuring held-out loss is work that no peer does here.
                heldout_every_steps=0,
            ),
            hooks=Hooks(
                record=record,
                save=lambda state: checkpoints.save(state, model=model, optimizer=optimizer),
                heldout=lambda: None,
                stop_requested=StopRequest(run_folder, world=world),
            ),
            world=world,
        )
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


def run_trainer(stamped: Stamped, *, batches: list[MicroBatch], folder: Path) -> None:
    """Train with the Hugging Face Trainer."""
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
        ),
        train_dataset=Batches(batches),
        data_collator=lambda examples: examples[0],
        optimizers=make_optimizer(stamped.module.model),
    )
    trainer.train()


def run_lightning(stamped: Stamped, *, batches: list[MicroBatch], folder: Path) -> None:
    """Train with Lightning."""
    import lightning
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
        gradient_clip_val=OPTIMIZER.max_grad_norm,
        default_root_dir=folder,
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
            step=step, epoch=0, micro_batches=[batch], rows=np.zeros((1, 1)), masked_keys=()
        )


def make_batches() -> list[MicroBatch]:
    """Make `NUM_BATCHES` micro-batches of four rows: an image of 4 x 4 patches, then text."""
    random = np.random.default_rng(0)
    shape = family(MODEL.family)
    grid, num_rows = (4, 4), 4
    num_image_tokens = grid[0] * grid[1] // IMAGE.merge**2
    batches = []
    for number in range(NUM_BATCHES):
        num_text = 24 + number % 8
        head = [TOKENS.vision_start, *[TOKENS.image] * num_image_tokens, TOKENS.vision_end]
        text_BS = random.integers(8, TOKENS.num_tokens, size=(num_rows, num_text))
        ids_BS = np.concatenate([np.tile(head, (num_rows, 1)), text_BS], axis=1)
        labels_BS = np.where(np.arange(ids_BS.shape[1]) >= ids_BS.shape[1] - 6, ids_BS, -100)
        positions_3BS = np.stack(
            [
                shape.position_ids(row, grids=[grid], image=IMAGE, image_token_id=TOKENS.image)
                for row in ids_BS
            ],
            axis=1,
        )
        patches_PD = random.normal(size=(num_rows * grid[0] * grid[1], 3 * IMAGE.patch_px**2))
        batches.append(
            MicroBatch(
                input_ids_BS=torch.from_numpy(ids_BS),
                labels_BS=torch.from_numpy(labels_BS),
                position_ids_3BS=torch.from_numpy(positions_3BS),
                pixel_values_PD=torch.from_numpy(patches_PD).float(),
                grid_thw_I3=torch.tensor([[1, *grid]] * num_rows),
                num_rows=num_rows,
                num_label_tokens=6 * num_rows,
                num_text_tokens=num_rows * (num_text + 2),
                num_image_tokens=num_rows * num_image_tokens,
                num_patches=len(patches_PD),
                num_slots=ids_BS.size,
            )
        )
    return batches


def check_equal_work(rounds: dict[str, list[Round]]) -> None:
    """Refuse figures of peers that did not train alike: the last loss within 1e-4 relative."""
    expected = rounds["plain"][0].losses
    for name, found in rounds.items():
        for one in found:
            assert len(one.losses) == NUM_STEPS, f"{name} took {len(one.losses)} steps"
            last, wanted = one.losses[-1], expected[-1]
            assert abs(last - wanted) <= 1e-4 * wanted, f"{name} ended at {last}, plain at {wanted}"
    assert expected[-NUM_BATCHES:].sum() < expected[:NUM_BATCHES].sum(), "nothing was learnt"


def judge(rounds: dict[str, list[Round]]) -> Measured:
    """Turn rounds into milliseconds per step and compare what loops add."""
    steps_ms = {
        name: [1e3 * float(np.median(one.step_s[NUM_WARMUP:])) for one in found]
        for name, found in rounds.items()
    }
    checkpoints_ms = [1e3 * checkpoint_s(one) for one in rounds["ours"]]
    median = {name: statistics.median(found) for name, found in steps_ms.items()}
    median["ours"] += statistics.median(checkpoints_ms) / CHECKPOINT_EVERY
    ours = median.pop("ours")
    ratio = (ours - median["plain"]) / (median["trainer"] - median["plain"])
    return Measured(
        unit="ms/step",
        ours=ours,
        peers=median,
        ratio=ratio,
        goal=f"(ours - plain) / (trainer - plain) <= {GOAL}",
        met=ratio <= GOAL,
        raw={
            "steps_ms": steps_ms,
            "checkpoints_ms": checkpoints_ms,
            "checkpoint_every_steps": CHECKPOINT_EVERY,
            "num_steps": NUM_STEPS,
            "last_loss": {name: found[0].losses[-1] for name, found in rounds.items()},
        },
    )


def checkpoint_s(one: Round) -> float:
    """Return what a checkpoint adds to the step that writes it, in seconds."""
    written = one.step_s[CHECKPOINT_EVERY - 1 :: CHECKPOINT_EVERY]
    return float(np.median(written) - np.median(one.step_s[NUM_WARMUP:]))


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
