"""The batches of one rank, step after step, from any step.

Shards, the processor and the schedule flow in; micro-batches flow out, in the schedule's order for
any number of workers. What is done with them is unknown here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from diptych.core.errors import FormatError
from diptych.core.records import LoaderState, Manifest
from diptych.data.assign import assign
from diptych.data.batcher import Batcher, Split
from diptych.data.collate import MicroBatch
from diptych.data.costs import load_costs
from diptych.data.processor import read_processor_info
from diptych.data.schedule import NO_ROW, Schedule

_PREFETCHED_STEPS = 2


@dataclass
class StepBatch:
    """One rank's share of a global batch.

    Attributes:
        step: counted over all epochs, from 0.
        epoch: which pass over the data.
        micro_batches: as many on every rank.
        rows: [number of micro-batches, micro_batch] int64, rows of the split, -1 for none.
        masked_keys: samples that could not be read and were left out of their rows.
    """

    step: int
    epoch: int
    micro_batches: list[MicroBatch]
    rows: np.ndarray
    masked_keys: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        """Count the rows that hold a sample."""
        return sum(batch.num_rows for batch in self.micro_batches)

    @property
    def num_label_tokens(self) -> int:
        """Count the labels that a shifted loss uses."""
        return sum(batch.num_label_tokens for batch in self.micro_batches)

    @property
    def num_text_tokens(self) -> int:
        """Count the samples' tokens that are not images'."""
        return sum(batch.num_text_tokens for batch in self.micro_batches)

    @property
    def num_image_tokens(self) -> int:
        """Count the tokens of the samples' images."""
        return sum(batch.num_image_tokens for batch in self.micro_batches)

    @property
    def num_patches(self) -> int:
        """Count the patches of the samples' images."""
        return sum(batch.num_patches for batch in self.micro_batches)

    @property
    def num_slots(self) -> int:
        """Count the places of all micro-batches, padding and all."""
        return sum(batch.num_slots for batch in self.micro_batches)

    def to(self, device: torch.device) -> StepBatch:
        """Move the tensors to a device."""
        return replace(self, micro_batches=[batch.to(device) for batch in self.micro_batches])


@dataclass(kw_only=True)
class Loader:
    """Iterates over one rank's step batches without end, from `state`; epochs follow each other.

    The state moves on with every batch that is handed out: `state_dict()`, taken while a batch is
    being worked on, names the step after it.

    Raises:
        FormatError: the state or the costs belong to another schedule, data or processor.
        ConfigError: the micro-batch does not fit the schedule's groups.
    """

    shards: Path
    manifest: Manifest
    processor: Path
    schedule: Schedule
    split: Split
    rank: int
    world_size: int
    micro_batch: int
    num_workers: int
    state: LoaderState = field(default_factory=LoaderState)

    def __post_init__(self) -> None:
        _check_identity(self)
        self._dataset = _Steps(
            batcher=Batcher(
                self.shards,
                self.manifest,
                self.processor,
                self.split,
                known_bad=frozenset(self.state.masked_keys),
            ),
            schedule=self.schedule,
            rank=self.rank,
            world_size=self.world_size,
            micro_batch=self.micro_batch,
        )
        self._dataset.deal(self.state.step)
        self._dataset.batcher.open()

    def __iter__(self) -> Iterator[StepBatch]:
        """Yield step batches from the state's step on."""
        parallel: dict[str, Any] = {}
        if self.num_workers:
            parallel = {"prefetch_factor": _PREFETCHED_STEPS, "persistent_workers": True}
        batches = DataLoader(
            self._dataset,
            sampler=_StepsFrom(self.state.step),
            batch_size=None,
            num_workers=self.num_workers,
            # Else the DataLoader would draw from the rank's own random numbers.
            generator=torch.Generator().manual_seed(0),
            **parallel,
        )
        for batch in batches:
            self._advance(batch)
            yield batch

    def state_dict(self) -> LoaderState:
        """Return where the loader is: the step after the last batch that was handed out."""
        return self.state

    def _advance(self, batch: StepBatch) -> None:
        step = batch.step + 1
        masked = dict.fromkeys((*self.state.masked_keys, *batch.masked_keys))
        self.state = self.state.model_copy(
            update={
                "step": step,
                "epoch": self.schedule.locate(step)[0],
                "schedule_sha256": self.schedule.sha256,
                "masked_keys": tuple(masked),
            }
        )


def heldout_batches(
    *,
    shards: Path,
    manifest: Manifest,
    costs: Path,
    processor: Path,
    max_samples: int,
    micro_batch: int,
    rank: int,
    world_size: int,
) -> list[MicroBatch]:
    """Make one rank's held-out micro-batches, the same list at every call.

    Samples are taken at equal distances over the split and sorted by length. Every rank gets as
    many micro-batches; empty ones fill up.

    Args:
        shards: the folder of shards.
        manifest: names them.
        costs: the `sample_costs` folder.
        processor: the processor's folder.
        max_samples: how many samples over all ranks, at most.
        micro_batch: rows of a micro-batch.
        rank: which rank.
        world_size: how many ranks.
    """
    measured = load_costs(costs, manifest=manifest, split="heldout")
    num_chosen = min(measured.num_samples, max_samples)
    chosen = np.arange(num_chosen) * measured.num_samples // max(1, num_chosen)
    chosen = chosen[np.argsort(measured.num_tokens[chosen], kind="stable")]
    num_batches = -(-len(chosen) // (micro_batch * world_size))
    rows = np.full((num_batches, world_size, micro_batch), NO_ROW, dtype=np.int64)
    rows.reshape(-1)[: len(chosen)] = chosen
    batcher = Batcher(shards, manifest, processor, "heldout")
    return [batcher.make(batch)[0] for batch in rows[:, rank]]


@dataclass
class _Steps(Dataset[StepBatch]):
    """Step -> one rank's batch; there is no last step."""

    batcher: Batcher
    schedule: Schedule
    rank: int
    world_size: int
    micro_batch: int

    def __getitem__(self, step: int) -> StepBatch:
        epoch, _ = self.schedule.locate(step)
        dealt = self.deal(step)
        read = [self.batcher.make(rows) for rows in dealt]
        return StepBatch(
            step=step,
            epoch=epoch,
            micro_batches=[batch for batch, _ in read],
            rows=np.stack(dealt),
            masked_keys=tuple(key for _, masked in read for key in masked),
        )

    def deal(self, step: int) -> list[np.ndarray]:
        """Return the rows of each of this rank's micro-batches."""
        epoch, number = self.schedule.locate(step)
        return assign(
            self.schedule.rows(epoch)[number],
            costs=self.schedule.row_costs,
            world_size=self.world_size,
            rank=self.rank,
            micro_batch=self.micro_batch,
            group=self.schedule.spec.group,
        )


class _StepsFrom(Sampler[int]):
    """The steps from one on, without end."""

    def __init__(self, first: int) -> None:
        self._first = first

    def __iter__(self) -> Iterator[int]:
        step = self._first
        while True:
            yield step
            step += 1


def _check_identity(loader: Loader) -> None:
    costs, info = loader.schedule.costs, read_processor_info(loader.processor)
    pairs = (
        ("sample costs", costs.manifest_sha256, "shards", loader.manifest.sha256),
        ("sample costs", costs.processor_sha256, "processor", info.sha256),
        (
            "loader's state",
            loader.state.schedule_sha256 or loader.schedule.sha256,
            "schedule",
            loader.schedule.sha256,
        ),
    )
    for what, found, of, expected in pairs:
        if found != expected:
            raise FormatError(
                f"The {what} belong to the {of} {found[:12]}",
                allowed=f"The {of} here is {expected[:12]}",
                cure="Resume with the data, processor and schedule that the run began with",
            )
