"""A file of samples that has grown too large: its path in, the same file with fewer lines out.

The newest lines stay as they are. Of older ones the first in each stretch of time is kept.
Stretches are a power of two seconds long and grow where there is no room, so whoever thins again
keeps some of what was kept. So a run of any length is covered from its start, evenly.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from diptych.core.files import replacing

_FIRST = 8
_TIME = re.compile(rb'"time_s": ?([0-9.]+)')


def stretch_of(times_s: Sequence[float]) -> float:
    """Return how far samples are apart: the power of two seconds nearest to the median; 1 of one.

    Args:
        times_s: of a node's first samples, in order.
    """
    gaps = [later - earlier for earlier, later in pairwise(times_s)]
    usual_s = median(gaps) if gaps else 0.0
    return 2.0 ** round(math.log2(usual_s)) if usual_s > 0 else 1.0


class _Line(NamedTuple):
    time_s: float
    begin: int
    num_bytes: int


def thin(path: Path, *, newest_bytes: int, older_bytes: int) -> None:
    """Replace a file of samples by a smaller one, at once.

    Args:
        path: whole lines, each with its `time_s`; one that has none is left out if it is old.
        newest_bytes: from the end, kept as they are.
        older_bytes: what is left of all before them at most.

    Raises:
        OSError: there is no room for the new file; the old one stays.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - newest_bytes))
        file.readline()
        newest = file.tell()
    with replacing(path) as partial, path.open("rb") as file, partial.open("wb") as output:
        for line in _spread(_list_lines(path, end=newest), most_bytes=older_bytes):
            file.seek(line.begin)
            output.write(file.read(line.num_bytes))
        file.seek(newest)
        shutil.copyfileobj(file, output)


def _list_lines(path: Path, *, end: int) -> list[_Line]:
    lines: list[_Line] = []
    begin = 0
    with path.open("rb") as file:
        for line in file:
            if begin >= end:
                break
            found = _TIME.search(line)
            if found:
                lines.append(_Line(float(found[1]), begin, len(line)))
            begin += len(line)
    return lines


def _spread(lines: list[_Line], *, most_bytes: int) -> list[_Line]:
    """Keep the first line of each stretch, the shortest with which all fit, as before or longer."""
    stretch_s = stretch_of([line.time_s for line in lines[: _FIRST + 1]])
    while len(lines) > 1 and sum(line.num_bytes for line in lines) > most_bytes:
        firsts: dict[float, _Line] = {}
        for line in lines:
            firsts.setdefault(line.time_s // stretch_s, line)
        lines = list(firsts.values())
        stretch_s *= 2
    return lines
