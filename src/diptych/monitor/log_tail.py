"""Follow the logs of many ranks: new lines as they come, and what of them a person should see once.

In: a folder of `rank-00000.log`, .... Out: lines with their rank's number; or lines at WARNING and
above and the ends of tracebacks, each once, with how many ranks wrote it. Memory and work are
bounded however much ranks write: what is beyond is skipped and counted.
"""

from __future__ import annotations

import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from diptych.core.terminal import plain

_LOOK_BYTES = 64 * 1024
_LINE_BYTES = 2048
_GATHER_S = 2.0
_MOST_SAID = 20
_REMEMBERED = 1024
_NAME = re.compile(r"rank-(\d+)\.log")
_STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")
_LEVEL = re.compile(r"(?:WARNING|ERROR|CRITICAL) \S")
_NCCL = re.compile(r"^\S+:\d+:\d+ \[\d+\] (NCCL WARN .*)")
_TRACEBACK = "Traceback (most recent call last):"


@dataclass
class _File:
    """How far one log has been read."""

    inode: int
    offset: int = 0
    rest: bytes = b""
    in_traceback: bool = False


@dataclass(frozen=True)
class Line:
    """A new line of a rank's log; `traced` where it ends a traceback."""

    rank: int
    text: str
    traced: bool = False


class LogTail:
    """Reads what the logs of a folder have gained since the last look.

    At most 64 KiB of each log and look: of what is longer the end is read, and the rest counted.

    Args:
        logs: the folder.
        begin: with what each log ends with now, or with what it gains from now on.

    Attributes:
        num_skipped_bytes: what was not read.
    """

    def __init__(self, logs: Path, *, begin: Literal["end", "now"] = "end") -> None:
        self._logs = logs
        self._files: dict[int, _File] = {}
        if begin == "now":
            self.read()
            for file in self._files.values():
                file.in_traceback = False
        self.num_skipped_bytes = 0

    def position(self, rank: int) -> int:
        """Return up to where a rank's log was read, in bytes: the end of a line."""
        file = self._files.get(rank)
        return 0 if file is None else file.offset - len(file.rest)

    def read(self) -> list[Line]:
        """Return new whole lines, rank by rank; a log that was replaced is read from its start."""
        lines: list[Line] = []
        try:
            with os.scandir(self._logs) as entries:
                found = sorted((entry.name, entry) for entry in entries)
        except OSError:
            return lines
        for name, entry in found:
            named = _NAME.fullmatch(name)
            if named is None:
                continue
            try:
                status = entry.stat()
                lines += self._read(int(named[1]), path=entry.path, status=status)
            except OSError:
                continue  # gone since, or not to be read now: the next look tells
        return lines

    def _read(self, rank: int, *, path: str, status: os.stat_result) -> list[Line]:
        file = self._files.get(rank)
        if file is None or file.inode != status.st_ino or status.st_size < file.offset:
            file = self._files[rank] = _File(inode=status.st_ino)
        if status.st_size == file.offset:
            return []
        num_new = status.st_size - file.offset
        with open(path, "rb", buffering=0) as opened:
            if num_new > _LOOK_BYTES:
                self.num_skipped_bytes += num_new - _LOOK_BYTES
                file.offset, file.rest = status.st_size - _LOOK_BYTES, b""
                opened.seek(file.offset)
                data = opened.read(_LOOK_BYTES)
                file.offset += len(data)
                data = data.partition(b"\n")[2]
                file.in_traceback = False
            else:
                opened.seek(file.offset)
                data = opened.read(num_new)
                file.offset += len(data)
        *whole, rest = (file.rest + data).split(b"\n")
        file.rest = rest[:_LINE_BYTES]
        return [_line(file, rank=rank, data=line) for line in whole]


def _line(file: _File, *, rank: int, data: bytes) -> Line:
    text = data[:_LINE_BYTES].decode("utf-8", errors="replace")
    if text.startswith(_TRACEBACK):
        file.in_traceback = True
        return Line(rank, text)
    ends = file.in_traceback and bool(text.strip()) and not text[0].isspace()
    file.in_traceback = file.in_traceback and not ends
    return Line(rank, text, traced=ends)


@dataclass
class _Said:
    """A line that waits for other ranks to write it too."""

    since_s: float
    ranks: set[int] = field(default_factory=set)


class Warnings:
    """What people should see of the logs: each line once, with how many ranks wrote it.

    A line waits two seconds for other ranks to write the same. What was said is not said again.

    Args:
        tail: the logs.
        clock: seconds, of any beginning.
    """

    def __init__(self, tail: LogTail, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tail = tail
        self._clock = clock
        self._waiting: OrderedDict[str, _Said] = OrderedDict()
        self._said: OrderedDict[str, None] = OrderedDict()
        self._num_left_out = 0

    def read(self, *, last: bool = False) -> list[str]:
        """Look at the logs and return what is due; `last` waits for no other rank."""
        now = self._clock()
        for line in self._tail.read():
            self._note(worth_saying(line), rank=line.rank, now=now)
        due = [
            text for text, said in self._waiting.items() if last or now - said.since_s >= _GATHER_S
        ]
        lines = [f"[{_ranks(self._waiting.pop(text).ranks)}] {text}" for text in due]
        self._remember(due)
        num_more = max(0, len(lines) - _MOST_SAID) + self._num_left_out
        if not due or not num_more:
            return lines
        self._num_left_out = 0
        return [*lines[:_MOST_SAID], f"({num_more} further warnings are in the logs)"]

    def _note(self, text: str | None, *, rank: int, now: float) -> None:
        if text is None:
            return
        if text in self._said:
            self._said.move_to_end(text)
        elif text in self._waiting:
            self._waiting[text].ranks.add(rank)
        elif len(self._waiting) >= _REMEMBERED:
            self._num_left_out += 1
        else:
            self._waiting[text] = _Said(since_s=now, ranks={rank})

    def _remember(self, texts: list[str]) -> None:
        self._said.update(dict.fromkeys(texts))
        while len(self._said) > _REMEMBERED:
            self._said.popitem(last=False)


def worth_saying(line: Line) -> str | None:
    """Return a line without its time if a person should see it; None for any other."""
    text = _STAMP.sub("", line.text)
    if text != line.text and _LEVEL.match(text):
        return plain(text)
    if line.traced and text == line.text:
        return plain(text)
    nccl = _NCCL.match(text)
    return plain(nccl[1]) if nccl else None


def _ranks(ranks: set[int]) -> str:
    first, num_others = min(ranks), len(ranks) - 1
    if not num_others:
        return f"rank {first}"
    return f"rank {first} and {num_others} other{'s' if num_others > 1 else ''}"
