"""Which checkpoint a run resumes from, and what one holds beside tensors.

In: a run's folder and its identity. Out: a restored engine and `TrainState`.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from diptych.core.errors import FormatError
from diptych.core.records import LoaderState
from diptych.parallel import storage
from diptych.parallel.engine import Engine
from diptych.parallel.mesh import World, gather_numbers
from diptych.train.loop import TrainState

_LOG = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run: the newest sound one to start from, the last few to keep."""

    def __init__(
        self, folder: Path, *, identity_sha256: str, schedule_sha256: str, keep: int, world: World
    ) -> None:
        self._folder = folder
        self._identity = identity_sha256
        self._schedule = schedule_sha256
        self._keep = keep
        self._world = world

    def save(self, state: TrainState, *, engine: Engine) -> Path:
        """Write the checkpoint of `state`, then drop the oldest ones; every rank calls it."""
        folder = self._folder / f"step-{state.step:08d}"
        loader = LoaderState(
            epoch=state.epoch,
            step=state.step,
            first_step=state.first_step,
            schedule_sha256=self._schedule,
            masked_keys=tuple(read_masked_keys(self._folder.parent)),
            skipped_steps=tuple(state.skipped_steps),
        )
        storage.save(
            folder,
            tensors=engine.tensors(),
            state={
                "engine": engine.state(),
                "identity_sha256": self._identity,
                "loader": loader.model_dump(mode="json"),
                "num_masked": state.num_masked,
                "num_updates": state.num_updates,
            },
            world=self._world,
        )
        if self._world.is_first:
            for old in storage.list_checkpoints(self._folder)[: -self._keep]:
                shutil.rmtree(old)
        return folder

    def restore(self, *, engine: Engine) -> tuple[TrainState, LoaderState]:
        """Load the newest sound checkpoint, or return the states of a run that has not begun.

        A damaged one is reported and passed over. Every rank calls it and loads the same one.

        Raises:
            FormatError: the checkpoints belong to another run.
        """
        chosen = self._newest_sound() if self._world.is_first else None
        step = int(gather_numbers([chosen if chosen is not None else -1], world=self._world)[0, 0])
        if step < 0:
            return TrainState(), LoaderState(schedule_sha256=self._schedule)
        folder = self._folder / f"step-{step:08d}"
        tensors = engine.tensors()
        storage.load(folder, tensors=tensors)
        stored = storage.read_state(folder)
        loader = LoaderState.model_validate(stored["loader"])
        self._check(
            stored["identity_sha256"], schedule_sha256=loader.schedule_sha256, name=folder.name
        )
        engine.take(tensors, num_updates=stored["num_updates"])
        engine.restore(stored.get("engine", {}))
        state = TrainState(
            step=loader.step,
            epoch=loader.epoch,
            first_step=loader.first_step,
            num_masked=stored["num_masked"],
            skipped_steps=list(loader.skipped_steps),
        )
        return state, loader

    def _newest_sound(self) -> int | None:
        for folder in reversed(storage.list_checkpoints(self._folder)):
            try:
                storage.verify(folder)
                storage.read_state(folder)
            except FormatError as error:
                _LOG.warning("passing over a checkpoint: %s", error)
                continue
            return int(folder.name.removeprefix("step-"))
        return None

    def _check(self, identity_sha256: str, *, schedule_sha256: str, name: str) -> None:
        for what, found, wanted in (
            ("run", identity_sha256, self._identity),
            ("schedule", schedule_sha256, self._schedule),
        ):
            if found != wanted:
                raise FormatError(
                    f"The checkpoint {name} belongs to another {what} ({found[:12]})",
                    allowed=f"This run resumes only {wanted[:12]}",
                    cure="Move the checkpoint away, or restore the parameters and data it had",
                )


def note_masked_keys(run_folder: Path, *, rank: int, step: int, keys: tuple[str, ...]) -> None:
    """Append this rank's masked samples to its own file in the run's folder."""
    with (run_folder / f"masked-{rank}.jsonl").open("a", encoding="utf-8") as file:
        for key in keys:
            file.write(json.dumps({"step": step, "key": key}) + "\n")


def read_masked_keys(run_folder: Path) -> list[str]:
    """Read every rank's masked samples, sorted, each once."""
    keys: set[str] = set()
    for path in run_folder.glob("masked-*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            keys.add(json.loads(line)["key"])
    return sorted(keys)
