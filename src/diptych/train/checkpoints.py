"""Which checkpoint a run resumes from, and what one holds beside tensors.

In: a run's folder and its identity. Out: a restored engine and `TrainState`; checkpoints of what it
becomes, written by `saver`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from diptych.core.errors import FormatError, RunError, VersionError
from diptych.core.files import write_bytes
from diptych.core.records import LoaderState, StepRecord
from diptych.parallel import storage
from diptych.parallel.engine import Engine
from diptych.parallel.mesh import World, barrier, gather_numbers
from diptych.parallel.writing import discard_partial
from diptych.train.loop import TrainState
from diptych.train.pace import Saving
from diptych.train.retention import Keep
from diptych.train.saver import Saver

_LOG = logging.getLogger(__name__)
_NONE = -1
LOGS = ("steps.jsonl", "attempts.jsonl")
"""What a checkpoint keeps of the run's folder; everything up to its step."""


class Checkpoints:
    """The checkpoints of one run: the newest sound one to start from, those to come."""

    def __init__(
        self,
        folder: Path,
        *,
        engine: Engine,
        identity_sha256: str,
        schedule_sha256: str,
        keep: Keep,
        saving: Saving,
        world: World,
    ) -> None:
        self._folder = folder
        self._engine = engine
        self._identity = identity_sha256
        self._schedule = schedule_sha256
        self._best = keep.best
        self._world = world
        self._saver = Saver(folder, keep=keep, saving=saving, world=world)
        self._record: StepRecord | None = None
        self.passed_over: list[str] = []

    @property
    def share(self) -> tuple[float, float]:
        """What this rank tells the others of its saves in every step."""
        return self._saver.share

    @property
    def num_failed(self) -> int:
        """How many saves of this attempt came to nothing."""
        return self._saver.num_failed

    def observe(self, shares: np.ndarray, *, step_s: float) -> None:
        """Take in what the ranks told, [world size, 2], and a step's seconds."""
        self._saver.observe(shares, step_s=step_s)

    def note(self, record: StepRecord) -> None:
        """Take in a step's record: a checkpoint of that step has its scores."""
        self._record = record

    def save(self, state: TrainState, *, wait: bool = False) -> None:
        """Save a state; beside the steps that follow if that loses less time, and may wait."""
        self._saver.save(
            _name(state.step),
            step=state.step,
            tensors=self._engine.tensors,
            state=self._describe(state),
            logs=self._read_logs(),
            wait=wait,
        )

    def save_weights(self, state: TrainState) -> None:
        """Save the weights alone, to be kept and shared."""
        self._saver.save(
            f"weights-{state.step:08d}",
            step=state.step,
            tensors=lambda: {
                name: tensor
                for name, tensor in self._engine.tensors().items()
                if name.startswith(storage.MODEL_PREFIX)
            },
            state=self._describe(state),
            logs={},
        )

    def conclude(self, state: TrainState) -> None:
        """See to it that the last state is saved; every rank calls it.

        Raises:
            RunError: it could not be written.
        """
        self._saver.finish()
        if not state.step or self._saver.is_saved(_name(state.step)):
            return
        self.save(state, wait=True)
        if not self._saver.is_saved(_name(state.step)):
            raise RunError(
                f"The checkpoint of step {state.step} could not be written, so the run cannot end",
                cure="Free some room where the run's folder is, or look at the disk; the same "
                "command then goes on from the newest checkpoint",
            )

    def close(self) -> None:
        """End what writes in the background."""
        self._saver.close()

    def restore(self) -> tuple[TrainState, LoaderState]:
        """Load the newest sound checkpoint, or return the states of a run that has not begun.

        A damaged one is reported and passed over. Every rank calls it and loads the same one.

        Raises:
            FormatError: the checkpoints belong to another run, or none of them is sound.
            VersionError: another release has written the newest one.
        """
        if self._world.is_first:
            discard_partial(self._folder)
        step = self._newest_sound()
        if step == _NONE:
            return TrainState(), LoaderState(schedule_sha256=self._schedule)
        folder = self._folder / _name(step)
        engine, tensors = self._engine, self._engine.tensors()
        stored = _read_whole_state(folder)
        loader = LoaderState.model_validate(stored["loader"])
        self._check(
            stored["identity_sha256"], schedule_sha256=loader.schedule_sha256, name=folder.name
        )
        storage.load(folder, tensors=tensors)
        engine.take(tensors, num_updates=stored["num_updates"])
        engine.restore(stored.get("engine", {}))
        if self._world.is_first:
            self._restore_logs(folder)
        self._saver.saved = folder.name
        return state_at(loader, num_masked=stored["num_masked"]), loader

    def _describe(self, state: TrainState) -> dict[str, Any]:
        loader = LoaderState(
            epoch=state.epoch,
            step=state.step,
            first_step=state.first_step,
            schedule_sha256=self._schedule,
            masked_keys=tuple(read_masked_keys(self._folder.parent)),
            skipped_steps=tuple(state.skipped_steps),
        )
        return {
            "engine": self._engine.state(),
            "identity_sha256": self._identity,
            "loader": loader.model_dump(mode="json"),
            "num_masked": state.num_masked,
            "num_updates": state.num_updates,
            "scores": self._scores(state.step),
        }

    def _scores(self, step: int) -> dict[str, float]:
        if self._record is None or self._record.step != step:
            return {}
        return scores_of(self._record)

    def _read_logs(self) -> dict[str, bytes]:
        if not self._world.is_first:
            return {}
        paths = [self._folder.parent / name for name in LOGS]
        return {path.name: path.read_bytes() for path in paths if path.is_file()}

    def _restore_logs(self, folder: Path) -> None:
        """Take a log from the checkpoint where the run's own has lost what the checkpoint has."""
        for name in LOGS:
            kept, own = folder / name, self._folder.parent / name
            if not kept.is_file():
                continue
            if not own.is_file() or own.stat().st_size < kept.stat().st_size:
                _LOG.warning("%s was lost or cut; it is taken from %s", name, folder.name)
                write_bytes(own, data=kept.read_bytes())

    def _newest_sound(self) -> int:
        """Find the newest checkpoint whose files are as they were written; the ranks share them.

        Damaged ones that are newer are put aside under another name: a run that comes to their
        steps again replaces none of them, and none counts as one that is kept.
        """
        folders = list(reversed(storage.list_checkpoints(self._folder)))
        # What the first rank sees: on a shared disk another may be late to see it.
        count = int(self._tell(len(folders)))
        steps = [
            int(self._tell(storage.step_of(folders[number]) if self._world.is_first else 0))
            for number in range(count)
        ]
        reasons: dict[int, str] = {}
        for step in steps:
            reason = self._find_damage(self._folder / _name(step))
            if reason is None:
                self.passed_over = self._put_aside(reasons)
                return step
            reasons[step] = reason
        if reasons:
            raise FormatError(
                f"No checkpoint of this run is sound: {'; '.join(reasons.values())}",
                cure=f"Put a sound copy of one into {self._folder}, or move that folder away to "
                "train anew",
            )
        return _NONE

    def _find_damage(self, folder: Path) -> str | None:
        """Say what is wrong with a checkpoint; every rank looks at a part of it.

        Raises:
            VersionError: it is whole, and another release has written it.
        """
        error: FormatError | None = None
        try:
            storage.verify(folder, rank=self._world.rank, world_size=self._world.size)
            storage.read_state(folder)
        except FormatError as found:
            error = found
            _LOG.warning("passing over a checkpoint: %s", error)
        kinds = [float(error is not None), float(type(error) is FormatError)]
        num_damaged, num_torn = gather_numbers(kinds, world=self._world).sum(axis=0).tolist()
        if isinstance(error, VersionError) and not num_torn:
            raise error
        if not num_damaged:
            return None
        return f"{folder.name}: {error.found if error else 'another rank found it damaged'}"

    def _put_aside(self, reasons: Mapping[int, str]) -> list[str]:
        """Rename damaged checkpoints; return what to say of them."""
        lines = []
        for step, reason in reasons.items():
            folder, number = self._folder / _name(step), 1
            while (aside := folder.with_name(f"damaged-{step:08d}-{number}")).exists():
                number += 1
            if self._world.is_first:
                folder.rename(aside)
            lines.append(f"passed over {reason}; it is kept as {aside.name}")
        barrier()
        return lines

    def _tell(self, number: float) -> float:
        """Return the first rank's number on every rank."""
        return float(gather_numbers([number], world=self._world)[0, 0])

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


def _read_whole_state(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's state with everything that a run needs.

    Raises:
        FormatError: something of it is not there.
    """
    stored = storage.read_state(folder)
    needed = ("identity_sha256", "loader", "num_masked", "num_updates")
    missing = [name for name in needed if name not in stored]
    if missing:
        raise FormatError(
            f"The state of {folder.name} has no {', '.join(missing)}",
            cure="Move the checkpoint away: the one before it is then used",
        )
    return stored


def _name(step: int) -> str:
    return f"step-{step:08d}"


def state_at(loader: LoaderState, *, num_masked: int) -> TrainState:
    """Return where a run is whose loader is there."""
    return TrainState(
        step=loader.step,
        epoch=loader.epoch,
        first_step=loader.first_step,
        num_masked=num_masked,
        skipped_steps=list(loader.skipped_steps),
    )


def scores_of(record: StepRecord) -> dict[str, float]:
    """Name the scores of a step that a checkpoint can be kept for; what was not measured is not."""
    scores = {"loss": record.loss, "heldout_loss": record.heldout_loss}
    scores |= {f"heldout_loss/{name}": loss for name, loss in record.heldout_loss_by_source.items()}
    return {name: score for name, score in scores.items() if score is not None}


def note_masked_keys(run_folder: Path, *, rank: int, step: int, keys: tuple[str, ...]) -> None:
    """Append this rank's masked samples to its own file in the run's folder."""
    path = run_folder / f"masked-{rank}.jsonl"
    text = "".join(json.dumps({"step": step, "key": key}) + "\n" for key in keys)
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        # A line that was cut off ends here.
        text = "\n" + text
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def read_masked_keys(run_folder: Path) -> list[str]:
    """Read every rank's masked samples, sorted, each once; a line that was cut off is left out."""
    keys: set[str] = set()
    for path in run_folder.glob("masked-*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                keys.add(json.loads(line)["key"])
    return sorted(keys)
