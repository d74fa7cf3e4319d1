"""Saves of a run's state: begun between two steps, done at once or beside the steps that follow.

In: what an engine holds, and what a checkpoint says beside it. Out: complete checkpoints, of which
the chosen ones are kept. A rank's thread writes its part; how far it is travels with the numbers
that ranks exchange in every step anyway, so that no thread ever waits for another rank. A save that
fails on any rank leaves nothing, is counted, and training goes on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diptych.core.errors import FormatError
from diptych.core.host import room_bytes
from diptych.core.units import format_bytes
from diptych.parallel import storage
from diptych.parallel.mesh import World, gather_numbers
from diptych.parallel.writing import (
    Piece,
    Staging,
    discard,
    partial_folder,
    pieces_of,
    seal,
    write_part,
)
from diptych.train.pace import Pace, Saving
from diptych.train.retention import Keep, Saved, steps_to_keep

_LOG = logging.getLogger(__name__)
_NICENESS = 10
_SHARE_OF_ROOM = 0.8


class Stage(IntEnum):
    """How far a rank is with a save."""

    IDLE = 0
    BUSY = 1
    WRITTEN = 2
    FAILED = 3


@dataclass(frozen=True)
class _Job:
    """A save that is under way: what becomes of it, and what goes into it beside tensors."""

    step: int
    folder: Path
    partial: Path
    state: dict[str, Any]
    logs: Mapping[str, bytes]


class Saver:
    """Writes the checkpoints of one run; every rank calls all of it, in the same order."""

    def __init__(self, folder: Path, *, keep: Keep, saving: Saving, world: World) -> None:
        self._folder = folder
        self._keep = keep
        self._world = world
        self._pace = Pace(saving)
        self._staging = Staging()
        self._room = _host_room
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=_be_nice)
        self._is_async = self._pace.is_async
        self._job: _Job | None = None
        self._written: Future[None] | None = None
        self._sealed: Future[None] | None = None
        self._num_begun = 0
        self.num_failed = 0
        self.saved: str | None = None

    @property
    def share(self) -> tuple[float, float]:
        """What this rank tells the others in every step: its stage, and how to save next."""
        return float(self._stage()), float(self._pace.is_async)

    def observe(self, shares: np.ndarray, *, step_s: float) -> None:
        """Take in what all ranks told in a step, and that step's seconds.

        Args:
            shares: [world size, 2], what `share` was on every rank.
            step_s: By this rank's clock.
        """
        self._pace.note_step(step_s)
        # The first rank's clock decides for all.
        self._is_async = bool(shares[0, 1])
        if self._job is not None and (shares[:, 0] >= Stage.WRITTEN).all():
            self._conclude(failed=bool((shares[:, 0] == Stage.FAILED).any()))
        self._look_at_seal()

    def save(
        self,
        name: str,
        *,
        step: int,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        state: dict[str, Any],
        logs: Mapping[str, bytes],
        wait: bool = False,
    ) -> None:
        """Save a state; beside the steps that follow, unless that loses more time or is unwanted.

        Args:
            name: The checkpoint's.
            step: How many steps are done.
            tensors: Gives what the engine holds.
            state: What is not a tensor.
            logs: Files to keep beside it; on the first rank.
            wait: Whether it must be done on return.
        """
        self.finish()
        is_async = self._is_async and not wait
        started_s = time.perf_counter()
        folder = self._folder / name
        partial = partial_folder(folder, number=self._num_begun)
        self._num_begun += 1
        self._job = _Job(step, folder, partial, {**state, "version": storage.VERSION}, logs)
        pieces = pieces_of(tensors(), rank=self._world.rank, world_size=self._world.size)
        staged = self._stage_pieces(pieces) if is_async else None
        self._written = self._thread.submit(
            write_part,
            partial,
            pieces=pieces if staged is None else staged,
            rank=self._world.rank,
            world_size=self._world.size,
        )
        if is_async:
            if staged is None:
                self._written.exception()
            self._pace.begin(time.perf_counter() - started_s)
            return
        self.finish()
        self._pace.note_waited(time.perf_counter() - started_s)

    def finish(self) -> None:
        """Wait for the save that is under way, if there is one."""
        if self._job is not None:
            if self._written is not None:
                self._written.exception()
            stages = gather_numbers([float(self._stage())], world=self._world)
            self._conclude(failed=bool((stages == Stage.FAILED).any()))
        if self._sealed is not None:
            self._sealed.exception()
        self._look_at_seal()

    def close(self) -> None:
        """End the thread, after what it does."""
        self._thread.shutdown()

    def _stage_pieces(self, pieces: list[Piece]) -> list[Piece] | None:
        """Copy pieces to the host; None where it has no room, and they are written as they are."""
        needed, room = self._staging.num_new_bytes(pieces), self._room()
        why = f"{format_bytes(needed)} are needed, {format_bytes(room)} are free"
        try:
            if needed <= room:
                return self._staging.copy(pieces)
        except (MemoryError, RuntimeError) as error:
            why = str(error)
        _LOG.warning("rank %d waits for a save, without room for a copy: %s", self._world.rank, why)
        return None

    def _stage(self) -> Stage:
        if self._written is None:
            return Stage.BUSY if self._sealed is not None else Stage.IDLE
        if not self._written.done():
            return Stage.BUSY
        return Stage.WRITTEN if self._written.exception() is None else Stage.FAILED

    def _conclude(self, *, failed: bool) -> None:
        """Have what all ranks have written become a checkpoint, or nothing."""
        job, written = self._job, self._written
        assert job is not None, "a save is under way"
        assert written is not None, "a save that is under way has been handed to the thread"
        self._job = self._written = None
        self._pace.end()
        if failed:
            self.num_failed += 1
            error = written.exception()
            if error is not None:
                _LOG.warning("rank %d could not write %s: %s", self._world.rank, job.folder, error)
            if self._world.is_first:
                _LOG.warning("no checkpoint of step %d; the earlier ones stay", job.step)
                self._thread.submit(discard, job.partial)
            return
        self.saved = job.folder.name
        if self._world.is_first:
            self._sealed = self._thread.submit(self._seal, job)

    def _seal(self, job: _Job) -> None:
        try:
            seal(
                job.partial,
                folder=job.folder,
                state=job.state,
                logs=job.logs,
                world_size=self._world.size,
            )
        except BaseException:
            discard(job.partial)
            raise
        self._prune()

    def _look_at_seal(self) -> None:
        if self._sealed is None or not self._sealed.done():
            return
        error, self._sealed = self._sealed.exception(), None
        if error is not None:
            self.num_failed += 1
            self.saved = None
            _LOG.warning("a checkpoint could not be completed; the earlier ones stay: %s", error)

    def is_saved(self, name: str) -> bool:
        """Whether this was saved last, and is complete, for all ranks; call `finish` before."""
        saved = gather_numbers([float(self.saved == name)], world=self._world)
        return bool(saved.all())

    def _prune(self) -> None:
        folders = storage.list_checkpoints(self._folder)
        saved = {_saved(folder, best=self._keep.best): folder for folder in folders}
        kept = steps_to_keep(saved, keep=self._keep)
        for each, folder in saved.items():
            if each.step not in kept:
                discard(folder)


def _saved(folder: Path, *, best: str | None) -> Saved:
    step = storage.step_of(folder)
    if best is None:
        return Saved(step)
    try:
        score = storage.read_state(folder)["scores"].get(best)
    except FormatError:
        score = None
    return Saved(step, score)


def _host_room() -> int:
    """Return the bytes of the host's memory that a copy may take, with as much for other ranks."""
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(_SHARE_OF_ROOM * room_bytes(num_processes=num_processes))


def _be_nice() -> None:
    """Have this thread take only what time the processor has to spare, where the system allows."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
