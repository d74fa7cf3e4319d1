"""The logs of one start of the ranks: which there are, and their lines, alone or merged by time.

In: a run's folder. Out: lines as bytes, with the number of their rank.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from diptych.core.errors import RunError
from diptych.monitor.tails import tail

_STAMP = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")


@dataclass(frozen=True)
class Logs:
    """The logs of one start: their folder, and of which ranks there are some."""

    folder: Path
    ranks: tuple[int, ...]

    def path(self, rank: int) -> Path:
        """Return where a rank's log is.

        Raises:
            RunError: it has none; says which have.
        """
        if rank not in self.ranks:
            raise RunError(
                f"{self.folder} has no log of rank {rank}",
                allowed=_there(self.ranks, folder=self.folder),
            )
        return self.folder / f"rank-{rank:05d}.log"


def find_logs(run: Path, *, launch: int | None = None) -> Logs:
    """Find the logs of a start of a run's ranks: the newest, or the one of this number.

    Raises:
        RunError: there is no such start; says which there are.
    """
    starts = sorted(int(path.name.removeprefix("attempt-")) for path in run.glob("logs/attempt-*"))
    if not starts:
        raise RunError(
            f"No rank of run {run.name} has been started, so there is no log", cure="kedro runs"
        )
    number = starts[-1] if launch is None else launch
    if number not in starts:
        raise RunError(
            f"Run {run.name} has no launch {launch}",
            allowed=f"There are {', '.join(map(str, starts))}",
        )
    folder = run / "logs" / f"attempt-{number:03d}"
    found = (re.fullmatch(r"rank-(\d+)\.log", path.name) for path in folder.iterdir())
    return Logs(folder=folder, ranks=tuple(sorted(int(each[1]) for each in found if each)))


def read_lines(path: Path, *, num_lines: int | None, end: int) -> Iterator[bytes]:
    """Read a log's whole lines up to a byte, or the last of them."""
    if num_lines is not None:
        yield from tail(path, num_lines=num_lines, end=end)
        return
    with path.open("rb") as file:
        while file.tell() < end and (line := file.readline()):
            yield line.rstrip(b"\n")


def merge_lines(logs: Sequence[tuple[int, Iterator[bytes]]]) -> Iterator[tuple[int, bytes]]:
    """Merge the lines of several ranks by their times; a line without one stays with the last."""

    def stamped(rank: int, lines: Iterator[bytes]) -> Iterator[tuple[bytes, int, int, bytes]]:
        stamp = b""
        for number, line in enumerate(lines):
            found = _STAMP.match(line)
            stamp = max(stamp, found[0]) if found else stamp
            yield stamp, rank, number, line

    for _, rank, _, line in heapq.merge(*(stamped(rank, lines) for rank, lines in logs)):
        yield rank, line


def _there(ranks: Sequence[int], *, folder: Path) -> str:
    if ranks:
        first, last = ranks[0], ranks[-1]
        is_whole = last - first + 1 == len(ranks)
        named = f"{first} to {last}" if is_whole and last > first else ", ".join(map(str, ranks))
        return f"There are those of rank {named}"
    others = sorted(path.name for path in folder.glob("*.log"))
    return f"No rank came so far; there are {', '.join(others)}" if others else "It is empty"
