"""The folders on a disk to which DeepSpeed moves a rank's states: claimed, and emptied at the end.

DeepSpeed names them by rank alone: two runs in one folder would write each other's states.
"""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import IO

from diptych.core.errors import LayoutError
from diptych.core.records import Layout
from diptych.parallel.mesh import World


class SwapFolders:
    """What a rank has of the disks that a layout offloads to; nothing where it does not."""

    def __init__(self, layout: Layout, *, world: World) -> None:
        offloads = (layout.zero.optimizer, layout.zero.parameters)
        self._rank = world.rank
        self._paths = sorted({Path(each.path) for each in offloads if each.path})
        self._locks = [self._claim(path) for path in self._paths]

    def clear(self) -> None:
        """Remove this rank's states and let another run have the folders."""
        for path, lock in zip(self._paths, self._locks, strict=True):
            for states in path.glob(f"zero_stage_3/*/rank{self._rank}"):
                shutil.rmtree(states, ignore_errors=True)
            lock.close()
        self._paths, self._locks = [], []

    def _claim(self, path: Path) -> IO[str]:
        """Hold the rank's lock, which the kernel lets go when the process ends.

        Raises:
            LayoutError: another run holds it.
        """
        lock = (path / f"rank{self._rank}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise LayoutError(
                f"Another run offloads to {path}",
                cure="Wait for it, or name another folder in plan.layout.zero",
            ) from None
        return lock
