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

from diptych.core.layouts import options_of
from diptych.core.records import Layout, RunSpec, StepRecord
from diptych.core.units import format_count, format_seconds

_LINE_EVERY_S = 10.0
_MAX_REMARKS = 20


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
    lines = [
        f"run {spec.run_id}: {spec.identity.num_steps} steps of {num_rows} rows, "
        f"{layout.engine} on {layout.world_size} x {layout.device}, {layout.precision}",
        *describe_options(layout),
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    remarks = _Remarks(layout)
    if not console.is_terminal:
        yield _Lines(
            spec.identity.num_steps, log_every=spec.placement.log_every_steps, remarks=remarks
        )
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
        yield _Bar(bar, num_steps=spec.identity.num_steps, remarks=remarks)


def describe_options(layout: Layout) -> list[str]:
    """Say what is not the default, and what makes the run's losses others than one process'."""
    options = options_of(layout)
    lines = [f"  with {', '.join(options)}"] if options else []
    return lines + [f"  departs from one process: {said}" for said in layout.departures]


class _Remarks:
    """What is said of a step that changed nothing; after so many of them they are only counted."""

    def __init__(self, layout: Layout) -> None:
        self._options = layout.mixed_precision.loss_scale
        self._num_said = 0

    def of(self, record: StepRecord) -> list[str]:
        """Explain a skipped step; nothing of any other."""
        if not record.skipped or self._num_said > _MAX_REMARKS:
            return []
        self._num_said += 1
        if self._num_said > _MAX_REMARKS:
            return ["further steps whose gradient is not finite are only counted"]
        found = [f"  {record.nonfinite}"] if record.nonfinite else []
        return [self._explain(record), *found]

    def _explain(self, record: StepRecord) -> str:
        step, scale = record.step, record.loss_scale
        if scale is None:
            return f"step {step}: the gradient was not finite, so no weight has changed"
        then = max(self._options.minimum, scale * self._options.backoff)
        if then < scale:
            return f"step {step} overflowed at loss scale {scale:g}: skipped, now {then:g}"
        return f"step {step} overflowed at the smallest loss scale, {scale:g}: skipped"


class _Pace:
    """Seconds per step over the last steps, from the records themselves."""

    def __init__(self) -> None:
        self._mean_s: float | None = None

    def left_s(self, record: StepRecord, *, num_steps: int) -> float:
        old = self._mean_s
        self._mean_s = record.step_s if old is None else 0.95 * old + 0.05 * record.step_s
        return self._mean_s * (num_steps - record.step)


def _numbers(record: StepRecord, *, left_s: float) -> str:
    rate = format_count(record.tokens_per_s)
    left = f"  {format_seconds(left_s)} left" if left_s else ""
    rates = "".join(f"  lr/{tower} {lr:.3g}" for tower, lr in record.lr_by_tower.items())
    scale = "" if record.loss_scale is None else f"  loss scale {record.loss_scale:g}"
    skipped = f"  {record.num_skipped} skipped" if record.num_skipped else ""
    recompiles = f"  {record.num_recompiles} recompiles" if record.num_recompiles else ""
    saves = f"  {record.num_failed_saves} failed saves" if record.num_failed_saves else ""
    return f"{_losses(record)}  {rate} tokens/s{rates}{scale}{skipped}{saves}{recompiles}{left}"


def _losses(record: StepRecord) -> str:
    loss = "not finite" if record.loss is None else f"{record.loss:.4f}"
    if record.vision_loss is None:
        return f"loss {loss}"
    return f"loss/language {loss}  loss/vision {record.vision_loss:.4f}"


class _Bar:
    def __init__(self, bar: RichProgress, *, num_steps: int, remarks: _Remarks) -> None:
        self._bar = bar
        self._remarks = remarks
        self._num_steps = num_steps
        self._task = bar.add_task("train", total=num_steps, numbers="starting the ranks")
        self._pace = _Pace()

    def show(self, record: StepRecord) -> None:
        left_s = self._pace.left_s(record, num_steps=self._num_steps)
        numbers = _numbers(record, left_s=left_s)
        self._bar.update(self._task, completed=record.step, numbers=numbers)
        for remark in self._remarks.of(record):
            self.say(remark)

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False)


class _Lines:
    def __init__(self, num_steps: int, *, log_every: int, remarks: _Remarks) -> None:
        self._num_steps = num_steps
        self._remarks = remarks
        self._log_every = log_every
        self._pace = _Pace()
        self._last_s = float("-inf")

    def show(self, record: StepRecord) -> None:
        for remark in self._remarks.of(record):
            self.say(remark)
        left_s = self._pace.left_s(record, num_steps=self._num_steps)
        now = time.monotonic()
        due = now - self._last_s >= _LINE_EVERY_S and record.step % self._log_every == 0
        if due or record.step == self._num_steps:
            self._last_s = now
            self.say(f"step {record.step}/{self._num_steps}  {_numbers(record, left_s=left_s)}")

    def say(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
