"""What a person sees while ranks run: one moving bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

from diptych.core.records import RunSpec, StepRecord
from diptych.core.units import format_count, format_seconds

_LINE_EVERY_S = 10.0


class Progress(Protocol):
    """Shows step records and remarks."""

    def show(self, record: StepRecord) -> None:
        """Show the newest step."""
        ...

    def say(self, text: str) -> None:
        """Show a remark."""
        ...


@contextmanager
def make_progress(spec: RunSpec) -> Iterator[Progress]:
    """Choose the display: a bar where standard output is a terminal, lines where it is not."""
    console = Console()
    layout = spec.placement.layout
    num_rows = spec.identity.schedule.global_batch
    console.print(
        f"run {spec.run_id}: {spec.identity.num_steps} steps of {num_rows} rows, "
        f"{layout.engine} on {layout.world_size} x {layout.device}, {layout.precision}",
        highlight=False,
        soft_wrap=True,
    )
    if not console.is_terminal:
        yield _Lines(spec.identity.num_steps, log_every=spec.placement.log_every_steps)
        return
    bar = RichProgress(
        TextColumn("train"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        console=console,
        refresh_per_second=4,
    )
    with bar:
        yield _Bar(bar, num_steps=spec.identity.num_steps)


class _Pace:
    """Seconds per step over the last steps, from the records themselves."""

    def __init__(self) -> None:
        self._mean_s: float | None = None

    def left_s(self, record: StepRecord, *, num_steps: int) -> float:
        old = self._mean_s
        self._mean_s = record.step_s if old is None else 0.95 * old + 0.05 * record.step_s
        return self._mean_s * (num_steps - record.step)


def _numbers(record: StepRecord, *, left_s: float) -> str:
    loss = "not finite" if record.loss is None else f"{record.loss:.4f}"
    rate = format_count(record.tokens_per_s)
    left = f"  {format_seconds(left_s)} left" if left_s else ""
    return f"loss {loss}  {rate} tokens/s{left}"


class _Bar:
    def __init__(self, bar: RichProgress, *, num_steps: int) -> None:
        self._bar = bar
        self._num_steps = num_steps
        self._task = bar.add_task("train", total=num_steps, numbers="starting the ranks")
        self._pace = _Pace()

    def show(self, record: StepRecord) -> None:
        left_s = self._pace.left_s(record, num_steps=self._num_steps)
        numbers = _numbers(record, left_s=left_s)
        self._bar.update(self._task, completed=record.step, numbers=numbers)

    def say(self, text: str) -> None:
        self._bar.console.print(text)


class _Lines:
    def __init__(self, num_steps: int, *, log_every: int) -> None:
        self._num_steps = num_steps
        self._log_every = log_every
        self._pace = _Pace()
        self._last_s = float("-inf")

    def show(self, record: StepRecord) -> None:
        left_s = self._pace.left_s(record, num_steps=self._num_steps)
        now = time.monotonic()
        due = now - self._last_s >= _LINE_EVERY_S and record.step % self._log_every == 0
        if due or record.step == self._num_steps:
            self._last_s = now
            self.say(f"step {record.step}/{self._num_steps}  {_numbers(record, left_s=left_s)}")

    def say(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
