"""`kedro watch`: a run's folder in, a display that moves with it out; lines where it is piped.

Reads only the folder, and asks the scheduler where this machine has it. Nothing is written.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from diptych.core.errors import DiptychError
from diptych.core.records import RunRow, StepRecord
from diptych.core.terminal import plain
from diptych.core.units import format_count, format_seconds
from diptych.drawing import ago, place, plot
from diptych.launch.job import Job, launcher
from diptych.monitor.log_tail import LogTail, Warnings
from diptych.monitor.run_folder import RunFolder, StepTail
from diptych.monitor.runs import read_row
from diptych.monitor.tails import parse_objects, sample_lines

_LOOK_S = 1.0
_LINE_EVERY_S = 10.0
_NEWS_EVERY_S = 15.0
_MOST_LOSSES = 2048
_SAMPLED = 512
_KEPT_WARNINGS = 6


class Losses:
    """A curve of bounded length: every other point goes where it grows too long."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = list(values)
        self._every = 1
        self._num_left = 0

    def add(self, value: float | None) -> None:
        """Add the next one; what is not finite is left out."""
        self._num_left += 1
        if value is None or self._num_left % self._every:
            return
        self.values.append(value)
        if len(self.values) > _MOST_LOSSES:
            self.values = self.values[::2]
            self._every *= 2


class Watched:
    """What is known of a run, and grows with every look."""

    def __init__(self, row: RunRow) -> None:
        self.row = row
        self.folder = RunFolder(Path(row.folder))
        # First as they are sampled over the whole log, then one by one.
        sampled = sample_lines(self.folder.steps, num_lines=_SAMPLED)
        losses = [each.get("loss") for each in parse_objects(sampled)]
        self.losses = Losses([loss for loss in reversed(losses) if loss is not None])
        self.record: StepRecord | None = None
        self.warnings: list[str] = []
        self.news: list[str] = []
        self._tail = StepTail(self.folder.steps, begin="end")
        self._logs: Path | None = None
        self._reader: Warnings | None = None
        self._job: Job | None = None
        self._asked_s = float("-inf")

    def look(self) -> tuple[list[StepRecord], list[str]]:
        """Look again; returns new step records, and new remarks of the ranks and the scheduler."""
        self.row = read_row(self.folder.path)
        records: list[StepRecord] = []
        with suppress(ValueError, OSError):
            records = self._tail.read()
        for record in records:
            self.record = record
            self.losses.add(record.loss)
        remarks = [*self._read_warnings(), *self._ask()]
        self.warnings = [*self.warnings, *remarks][-_KEPT_WARNINGS:]
        return records, remarks

    def _read_warnings(self) -> list[str]:
        launched = None
        with suppress(ValueError, OSError):
            launched = self.folder.read_launched()
        if launched is None:
            return []
        logs = self.folder.path / launched.logs
        if logs != self._logs:  # the ranks were started anew
            self._logs, self._reader, self._job = logs, Warnings(LogTail(logs)), None
            with suppress(DiptychError, OSError, ImportError):
                self._job = launcher(launched.kind).attach(launched, folder=self.folder)
        assert self._reader is not None, "it is made with the logs' folder"
        return self._reader.read(last=not self.row.goes_on)

    def _ask(self) -> list[str]:
        if self._job is None or time.monotonic() - self._asked_s < _NEWS_EVERY_S:
            return []
        self._asked_s = time.monotonic()
        with suppress(DiptychError, OSError):
            return [plain(line) for line in self._job.news()]
        return []


def watch(row: RunRow, *, console: Console) -> RunRow:
    """Show a run until it ends; returns its row then."""
    watched = Watched(row)
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4) as live:
            while True:
                watched.look()
                live.update(draw(watched, width=console.width, encoding=console.encoding))
                if not watched.row.goes_on:
                    return watched.row
                time.sleep(_LOOK_S)
    return _print_lines(watched, console=console)


def draw(watched: Watched, *, width: int, encoding: str = "utf-8") -> RenderableType:
    """Draw what is known of a run."""
    row = watched.row
    now_s = time.time()
    parts: list[RenderableType] = [
        Text(f"run {row.run_id}  {row.state}  {place(row)}  moved {ago(row.moved_s, now_s=now_s)}")
    ]
    if row.problem:
        parts.append(Text(plain(row.problem), style="red"))
    if row.num_steps:
        bar = ProgressBar(total=row.num_steps, completed=row.step or 0, width=min(width, 60))
        parts.append(Padding(bar, 0))  # which ends its line
    parts.append(Text(describe(watched)))
    chart = plot(watched.losses.values, width=min(width - 10, 100), height=8, encoding=encoding)
    if chart:
        parts += [Text("loss"), *map(Text, chart)]
    parts.append(Text(_checkpoints(watched.folder, now_s=now_s)))
    parts += [Text(line, style="yellow", no_wrap=True) for line in watched.warnings]
    return Group(*parts)


def describe(watched: Watched) -> str:
    """Say in one line how far a run is, and how fast."""
    row = watched.row
    rate = None if row.tokens_per_s is None else format_count(row.tokens_per_s)
    words = {
        "loss {:.4f}": row.loss,
        "held-out {:.4f}": row.heldout_loss,
        "{} tokens/s": rate,
        **_pace(row, record=watched.record),
    }
    said = [form.format(value) for form, value in words.items() if value is not None]
    return "  ".join([f"step {row.step or 0}/{row.num_steps or '?'}", *said])


def _pace(row: RunRow, *, record: StepRecord | None) -> dict[str, float | str | None]:
    if record is None:
        return {}
    left_s = record.step_s * ((row.num_steps or 0) - record.step)
    left = format_seconds(left_s) if row.goes_on and left_s > 0 else None
    return {"{:.3g} s/step": record.step_s, "{} left": left}


def _checkpoints(folder: RunFolder, *, now_s: float) -> str:
    found = []
    for path in folder.checkpoints.glob("step-*/checksums.json"):
        with suppress(OSError):
            found.append((path.parent.name.removeprefix("step-").lstrip("0"), path.stat().st_mtime))
    if not found:
        return "no checkpoint yet"
    found.sort(key=lambda each: each[1])
    names = ", ".join(name or "0" for name, _ in found[-4:])
    return f"checkpoints of step {names}; the newest {ago(found[-1][1], now_s=now_s)}"


def _print_lines(watched: Watched, *, console: Console) -> RunRow:
    due_s = float("-inf")
    while True:
        _, remarks = watched.look()
        for line in remarks:
            console.print(line, markup=False, soft_wrap=True)
        row = watched.row
        if not row.goes_on or time.monotonic() >= due_s:
            due_s = time.monotonic() + _LINE_EVERY_S
            line = f"run {row.run_id}  {row.state}  {describe(watched)}"
            console.print(line, markup=False, soft_wrap=True)
        if not row.goes_on:
            return row
        time.sleep(_LOOK_S)
