"""A disk that fails on purpose: the operations that write a checkpoint, counted, and one of them
killed, torn, out of room or in error.

`with disk(at=7, kind="kill"):` makes the seventh operation of `parallel.writing` that fault.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from diptych.core.records import StepRecord
from diptych.parallel import writing
from diptych.parallel.mesh import World
from diptych.train.checkpoints import Checkpoints
from diptych.train.loop import TrainState
from diptych.train.retention import Keep

KINDS = ("kill", "torn", "ENOSPC", "EIO")
OPERATIONS = ("makedirs", "open", "write", "fsync", "rename", "unlink")
EXIT_CODE = 77


class Disk:
    """Stands in for `os` and `shutil`; its count begins at 1."""

    def __init__(self, *, at: int | None, kind: str, forever: bool) -> None:
        self.at, self.kind, self.forever = at, kind, forever
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        if name == "rmtree":
            return self._rmtree
        found = getattr(os, name)
        return self._counted(name, found) if name in OPERATIONS else found

    def _counted(self, name: str, found: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if self._is_due():
                self._fail(name, arguments)
            return found(*arguments, **named)

        return call

    def _is_due(self) -> bool:
        self.count += 1
        return self.at is not None and (
            self.count == self.at or (self.forever and self.count > self.at)
        )

    def _fail(self, name: str, arguments: tuple[Any, ...]) -> None:
        if self.kind == "torn" and name == "write":
            descriptor, data = arguments
            os.write(descriptor, bytes(data)[: len(data) // 2])
        if self.kind in ("kill", "torn"):
            os._exit(EXIT_CODE)
        number = getattr(errno, self.kind)
        raise OSError(number, os.strerror(number))

    def _rmtree(self, folder: Path, *, ignore_errors: bool = False) -> None:
        if self._is_due() and self.kind in ("kill", "torn"):
            # Half of it is gone.
            for path in sorted(Path(folder).glob("*"))[::2]:
                path.unlink()
            os._exit(EXIT_CODE)
        shutil.rmtree(folder, ignore_errors=ignore_errors)


@contextmanager
def disk(*, at: int | None = None, kind: str = "EIO", forever: bool = False) -> Iterator[Disk]:
    """Put a failing disk under `parallel.writing`, which takes few bytes at a time."""
    found = Disk(at=at, kind=kind, forever=forever)
    originals = writing.os, writing.shutil, writing._CHUNK_BYTES
    writing.os, writing.shutil, writing._CHUNK_BYTES = found, found, 32
    try:
        yield found
    finally:
        writing.os, writing.shutil, writing._CHUNK_BYTES = originals


class Weights:
    """An engine of two tensors; each step adds one to all of them."""

    def __init__(self) -> None:
        self.held = {
            "model.weight": torch.arange(24.0).reshape(4, 6),
            "optimizer.weight.exp_avg": torch.zeros(4, 6, dtype=torch.bfloat16),
        }

    def step(self) -> None:
        for tensor in self.held.values():
            tensor += 1

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.held

    def take(self, tensors: Any, *, num_updates: int) -> None:
        assert num_updates >= 0

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Any) -> None:
        assert state == {}


ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def checkpoints(
    folder: Path,
    *,
    engine: Any,
    saving: Any = "async",
    keep: Keep = Keep(last=2),  # noqa: B008 - frozen
    identity: str = "ours",
    world: World = ALONE,
) -> Checkpoints:
    """Checkpoints of a run's folder."""
    return Checkpoints(
        folder / "checkpoints",
        engine=engine,
        identity_sha256=identity,
        schedule_sha256="schedule",
        keep=keep,
        saving=saving,
        world=world,
    )


def after(step: int) -> TrainState:
    """The state of a run after so many steps."""
    return TrainState(step=step)


def record(step: int, **values: Any) -> StepRecord:
    """A step's record."""
    return StepRecord.model_validate(
        {
            "step": step,
            "epoch": 0,
            "loss": 1.0,
            "lr": 0.1,
            "grad_norm": 1.0,
            **dict.fromkeys(
                (
                    "num_rows",
                    "num_samples",
                    "num_label_tokens",
                    "num_text_tokens",
                    "num_image_tokens",
                    "num_patches",
                ),
                1,
            ),
            "padding_fraction": 0.0,
            "step_s": 1.0,
            "data_s": 0.0,
            "tokens_per_s": 1.0,
            **values,
        }
    )
