"""What ranks must have alike before they train: code, packages, clocks, one folder; and it alone.

In: a process group and the run's folder. Out: checks that are equal on every rank, and the run's
lock, which the first rank holds for as long as it lives. Only workers import this.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from diptych.core import provenance
from diptych.core.errors import RunError
from diptych.core.host import node_name
from diptych.core.records import Check, CheckStatus
from diptych.launch.alike import compare_clocks, compare_code, compare_versions, some
from diptych.parallel import mesh
from diptych.parallel.mesh import World

_LOG = logging.getLogger(__name__)
_COMPARED = (
    *provenance.PACKAGES,
    "tokenizers",
    "deepspeed",
    "peft",
    "torchao",
    "liger-kernel",
    "flash-attn",
)
_ALONE = "alone"
_LOCK_WAIT_S = 20.0
_TOKEN_WAIT_S = 5.0
_POLL_S = 0.2


class OthersTrainError(RunError):
    """Other ranks train this run: nothing of its folder is to be touched."""


class RunLock:
    """The run's lock among ranks: a record lock, which ends with the process that holds it.

    Record locks are not inherited by the loader's workers, and hold on network disks too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def take(self, *, token: str, within_s: float) -> str | None:
        """Take the lock and write who holds it; returns why it cannot be had, else None.

        Ranks that are started again may overlap with those before them, so it is tried for a while.
        """
        file = self._path.open("a+", encoding="utf-8")
        if not _lock(file, within_s=within_s):
            file.seek(0)
            held_by = _holder(file.read())
            file.close()
            return held_by
        facts = {"host": socket.gethostname(), "pid": os.getpid(), "token": token}
        file.truncate(0)
        file.write(json.dumps(facts) + "\n")
        file.flush()
        os.fsync(file.fileno())
        self._file = file  # closing any handle of it would give the lock up
        return None

    def release(self) -> None:
        """Give the lock up, if it is held."""
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass
class Agreement:
    """What the ranks found, and the lock that goes with it."""

    checks: tuple[Check, ...]
    lock: RunLock = field(repr=False)

    def refuse_failed(self) -> None:
        """Refuse to train.

        Raises:
            OthersTrainError: other ranks train this run.
            RunError: ranks differ in what they must have alike.
        """
        for check in self._of("warn"):
            _LOG.warning("%s: %s. %s", check.name, check.found, check.cure)
        failed = self._of("fail")
        if failed:
            self.lock.release()
            raise (OthersTrainError if failed[0].name == _ALONE else RunError)(
                "; ".join(check.found for check in failed),
                cure="; ".join(check.cure for check in failed),
            )

    def _of(self, status: CheckStatus) -> list[Check]:
        return [check for check in self.checks if check.status == status]


def agree(
    folder: Path,
    *,
    world: World,
    timeout_s: float = mesh.TIMEOUT_S,
    clock: Callable[[], float] = time.time,
) -> Agreement:
    """Have all ranks compare what they must have alike.

    Args:
        folder: the run's.
        world: this rank and the others.
        timeout_s: how long a collective may take; the first rank waits less for the run's lock.
        clock: this node's, in seconds since 1970.
    """
    lock = RunLock(folder / "ranks.lock")
    token = uuid.uuid4().hex
    within_s = min(_LOCK_WAIT_S, timeout_s / 2)
    held_by = lock.take(token=token, within_s=within_s) if world.is_first else None
    facts = {
        "node": node_name(),
        "code": provenance.hash_sources(),
        "versions": provenance.read_versions(_COMPARED),
        "folder": str(folder),
        "token": token,
        "held_by": held_by,
    }
    ranks = [json.loads(text) for text in mesh.gather_texts(json.dumps(facts), world=world)]
    times = _times(world, clock=clock)
    nodes = [rank["node"] for rank in ranks]
    checks = [
        _check_lock(ranks[0]["held_by"], folder=Path(ranks[0]["folder"])),
        compare_code(ranks),
        compare_versions(ranks),
        compare_clocks(nodes, times_s=times.tolist()),
    ]
    if ranks[0]["held_by"] is None:
        # The first one knows, and a second handle of the file would give up its lock.
        sees = world.is_first or _sees(folder / "ranks.lock", token=ranks[0]["token"])
        seen = mesh.gather_numbers([float(sees)], world=world)[:, 0]
        checks.append(_check_folder(ranks[0]["folder"], seen=seen, nodes=nodes))
    return Agreement(checks=tuple(checks), lock=lock)


def _times(world: World, *, clock: Callable[[], float]) -> np.ndarray:
    mesh.barrier()
    return mesh.gather_numbers([clock()], world=world)[:, 0]


def _check_lock(held_by: str | None, *, folder: Path) -> Check:
    if held_by is None:
        return Check(name=_ALONE, status="pass", found="no other ranks train it", where="ranks")
    return Check(
        name=_ALONE,
        status="fail",
        found=f"Other ranks train this run in {folder}: {held_by}",
        cure=f"Wait for them, or stop them: kedro stop {folder.name}",
        where="ranks",
    )


def _check_folder(folder: str, *, seen: np.ndarray, nodes: Sequence[str]) -> Check:
    """Name the nodes that did not see what the first one wrote."""
    blind = sorted({node for node, sees in zip(nodes, seen, strict=True) if not sees})
    if blind:
        return Check(
            name="folder",
            status="fail",
            found=f"{some(blind)} does not see what {nodes[0]} writes into {folder}",
            cure="Put folders.runs on a disk that all nodes share, under the same path",
            where="ranks",
        )
    return Check(name="folder", status="pass", found=f"{folder}, seen by all", where="ranks")


def _sees(path: Path, *, token: str) -> bool:
    deadline = time.monotonic() + _TOKEN_WAIT_S
    while True:
        try:
            if token in path.read_text("utf-8"):
                return True
        except OSError:
            pass  # another node's disk may show it a little later
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)


def _lock(file: IO[str], *, within_s: float) -> bool:
    """Try for a while to lock a file; where its disk knows no locks nobody is kept out."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= deadline:
                return False
        except OSError as error:
            _LOG.warning("the run's folder takes no lock (%s): nothing keeps others out", error)
            return True
        time.sleep(_POLL_S)


def _holder(text: str) -> str:
    try:
        facts = json.loads(text)
        return f"process {facts['pid']} on {facts['host']}"
    except (ValueError, KeyError, TypeError):
        return "a process that did not say which"
