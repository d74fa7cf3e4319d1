"""The batches of one rank, step after step, from any step.

Shards, the processor and the schedule flow in; micro-batches flow out, in the schedule's order for
any number of workers. What is done with them is unknown here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from diptych.core.errors import FormatError
from diptych.core.records import LoaderState, Manifest
from diptych.data.batcher import Batcher, Split
from diptych.data.collate import MicroBatch, Multiples
from diptych.data.costs import load_costs
from diptych.data.images.features import Features
from diptych.data.processor import read_processor_info
from diptych.data.schedule.assign import assign
from diptych.data.schedule.ragged import Rows, pack_rows
from diptych.data.schedule.schedule import Schedule

_PREFETCHED_STEPS = 2


class Place(NamedTuple):
    """Which step: counted over all epochs, and within its epoch; all from 0."""

    step: int
    epoch: int
    number: int


@dataclass
class StepBatch:
    """One rank's share of a global batch.

    Attributes:
        step: counted over all epochs, from 0.
        epoch: which pass over the data.
        number: the step within its epoch, from 0.
        micro_batches: as many on every rank.
        rows: what each micro-batch was made of: samples of the split.
        masked_keys: samples that could not be read and were left out of their rows.
        cost: the schedule's cost of this rank's rows, 1 for an average sample.
    """

    step: int
    epoch: int
    number: int
    micro_batches: list[MicroBatch]
    rows: list[Rows]
    masked_keys: tuple[str, ...]
    cost: float

    @property
    def num_rows(self) -> int:
        """Count the rows that hold a sample."""
        return sum(batch.num_rows for batch in self.micro_batches)

    @property
    def num_samples(self) -> int:
        """Count the samples that are in the rows; those that were masked are not."""
        return sum(batch.num_samples for batch in self.micro_batches)

    @property
    def num_paired(self) -> int:
        """Count the samples that have both an image and a label."""
        return sum(batch.num_paired for batch in self.micro_batches)

    @property
    def num_samples_by_source(self) -> np.ndarray:
        """Count the samples of each source, [number of sources] int64."""
        return np.sum([batch.num_samples_by_source for batch in self.micro_batches], axis=0)

    @property
    def num_label_tokens_by_source(self) -> np.ndarray:
        """Count the labels of each source, [number of sources] int64."""
        return np.sum([batch.num_label_tokens_by_source for batch in self.micro_batches], axis=0)

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

    @property
    def squares(self) -> tuple[int, int, int]:
        """Sum the squares of rows' places, of samples' tokens, and of images' patches."""
        return (
            sum(batch.squared_slots for batch in self.micro_batches),
            sum(batch.squared_tokens for batch in self.micro_batches),
            sum(batch.squared_patches for batch in self.micro_batches),
        )

    def pin_memory(self) -> StepBatch:
        """Copy the tensors to page-locked memory; the DataLoader calls it by this name."""
        return replace(self, micro_batches=[batch.pin_memory() for batch in self.micro_batches])


@dataclass(kw_only=True)
class Loader:
    """Iterates over one rank's step batches without end, from `state`; epochs follow each other.

    The state moves on with every batch that is handed out: `state_dict()`, taken while a batch is
    being worked on, names the step after it.

    Raises:
        FormatError: the state or the costs belong to another schedule, data or processor.
        ConfigError: the micro-batch does not fit the schedule's groups.
        LayoutError: no filler image has a multiple of so many patches.
    """

    shards: Path | str
    manifest: Manifest
    processor: Path
    schedule: Schedule
    split: Split
    rank: int
    world_size: int
    micro_batch: int
    num_workers: int
    state: LoaderState = field(default_factory=LoaderState)
    image_cache: Path | None = None
    image_cache_bytes: int = 0
    features: Features | None = None
    multiples: Multiples = field(default_factory=Multiples)

    def __post_init__(self) -> None:
        _check_identity(self)
        self.state = _settle(self.state, schedule=self.schedule)
        spec = self.schedule.spec
        self._dataset = _Steps(
            batcher=Batcher(
                shards=self.shards,
                manifest=self.manifest,
                processor=self.processor,
                split=self.split,
                row_tokens=spec.max_row_tokens if spec.mode == "pack" else None,
                known_bad=frozenset(self.state.masked_keys),
                image_cache=self.image_cache,
                image_cache_bytes=self.image_cache_bytes,
                features=self.features,
                multiples=self.multiples,
            ),
            schedule=self.schedule,
            rank=self.rank,
            world_size=self.world_size,
            micro_batch=self.micro_batch,
        )
        self._dataset.deal(self._place)
        self._dataset.batcher.open()

    def __iter__(self) -> Iterator[StepBatch]:
        """Yield step batches from the state's step on."""
        parallel: dict[str, Any] = {}
        if self.num_workers:
            parallel = {"prefetch_factor": _PREFETCHED_STEPS, "persistent_workers": True}
        batches = DataLoader(
            self._dataset,
            sampler=_PlacesFrom(self._place, schedule=self.schedule),
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
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

    @property
    def _place(self) -> Place:
        state = self.state
        return Place(state.step, state.epoch, state.step - state.first_step)

    def _advance(self, batch: StepBatch) -> None:
        following = _after(Place(batch.step, batch.epoch, batch.number), schedule=self.schedule)
        masked = dict.fromkeys((*self.state.masked_keys, *batch.masked_keys))
        self.state = self.state.model_copy(
            update={
                "step": following.step,
                "epoch": following.epoch,
                "first_step": following.step - following.number,
                "schedule_sha256": self.schedule.sha256,
                "masked_keys": tuple(masked),
            }
        )


def heldout_batches(
    batcher: Batcher,
    *,
    costs: Path,
    max_samples: int,
    micro_batch: int,
    rank: int,
    world_size: int,
) -> list[MicroBatch]:
    """Make one rank's held-out micro-batches, the same list at every call.

    Samples are taken at equal distances over what is usable of the split and sorted by length; a
    row is one sample. Every rank gets as many micro-batches; empty rows fill up.

    Args:
        batcher: of the split 'heldout', one sample a row.
        costs: the `sample_costs` folder.
        max_samples: how many samples over all ranks, at most.
        micro_batch: rows of a micro-batch.
        rank: which rank.
        world_size: how many ranks.
    """
    measured = load_costs(costs, manifest=batcher.manifest, split="heldout")
    usable = np.flatnonzero(measured.column("usable"))
    num_chosen = min(len(usable), max_samples)
    chosen = usable[np.arange(num_chosen) * len(usable) // max(1, num_chosen)]
    chosen = chosen[np.argsort(measured.take(chosen).num_tokens, kind="stable")]
    num_batches = -(-num_chosen // (micro_batch * world_size))
    rows = [chosen[at : at + 1] for at in range(num_batches * world_size * micro_batch)]
    mine = range(rank * micro_batch, len(rows), world_size * micro_batch)
    return [batcher.make(pack_rows(rows[at : at + micro_batch]))[0] for at in mine]


@dataclass
class _Steps(Dataset[StepBatch]):
    """Place -> one rank's batch; there is no last one."""

    batcher: Batcher
    schedule: Schedule
    rank: int
    world_size: int
    micro_batch: int

    def __getitem__(self, place: Place) -> StepBatch:
        dealt = self.deal(place)
        if self.batcher.is_remote:
            self.batcher.expect([*dealt, *self.deal(self._next(place))])
        read = [self.batcher.make(rows) for rows in dealt]
        return StepBatch(
            step=place.step,
            epoch=place.epoch,
            number=place.number,
            micro_batches=[batch for batch, _ in read],
            rows=dealt,
            masked_keys=tuple(key for _, masked in read for key in masked),
            cost=float(sum(self.schedule.weigh(rows).sum() for rows in dealt)),
        )

    def _next(self, place: Place) -> Place:
        """Return the step after this one that falls to the same worker."""
        worker = get_worker_info()
        for _ in range(1 if worker is None else worker.num_workers):
            place = _after(place, schedule=self.schedule)
        return place

    def deal(self, place: Place) -> list[Rows]:
        """Return the rows of each of this rank's micro-batches."""
        rows = self.schedule.rows(place.epoch, place.number)
        return assign(
            rows,
            costs=self.schedule.weigh(rows),
            world_size=self.world_size,
            rank=self.rank,
            micro_batch=self.micro_batch,
            group=self.schedule.group,
        )


class _PlacesFrom(Sampler[Place]):
    """The places from one on, without end."""

    def __init__(self, first: Place, *, schedule: Schedule) -> None:
        self._first = first
        self._schedule = schedule

    def __iter__(self) -> Iterator[Place]:
        place = self._first
        while True:
            yield place
            place = _after(place, schedule=self._schedule)


def _after(place: Place, *, schedule: Schedule) -> Place:
    if schedule.is_last(place.epoch, place.number):
        return Place(place.step + 1, place.epoch + 1, 0)
    return Place(place.step + 1, place.epoch, place.number + 1)


def _settle(state: LoaderState, *, schedule: Schedule) -> LoaderState:
    """Go on in the next epoch where the state's is done.

    Raises:
        FormatError: the schedule has no such step.
    """
    number = state.step - state.first_step
    if number == 0 or (number > 0 and not schedule.is_last(state.epoch, number - 1)):
        return state
    num_steps = schedule.num_steps(state.epoch)
    if number != num_steps:
        raise FormatError(
            f"The loader's state is at step {number} of epoch {state.epoch}",
            allowed=f"That epoch has {num_steps} steps",
            cure="Resume from a checkpoint that this run has written",
        )
    return state.model_copy(update={"epoch": state.epoch + 1, "first_step": state.step})


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
