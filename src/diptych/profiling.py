"""`kedro profile`: a run's folder in, a trace of some of its steps out, summed up.

Reads and writes only the folder: the file `profile` in it is heeded by the ranks of a run that goes
on, wherever they are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from diptych.core.errors import RunError
from diptych.core.files import write_text
from diptych.core.records import Operator, RunRow, TraceSummary
from diptych.core.terminal import plain
from diptych.core.units import format_count, format_seconds
from diptych.monitor.run_folder import RunFolder
from diptych.monitor.runs import read_row
from diptych.monitor.traces import find_traces

_POLL_S = 0.5
_QUIET_S = 300.0
_MOST_CHARS = 64


def ask_profile(row: RunRow, *, num_steps: int, tell: Callable[[str], None]) -> dict[int, Path]:
    """Have a run that goes on profile some steps, and wait for the traces.

    Returns:
        The traces by rank, as many as the ranks have written in time.

    Raises:
        RunError: the run does not go on, or ends before, or its ranks do not answer.
    """
    folder = RunFolder(Path(row.folder))
    if not row.goes_on:
        raise RunError(
            f"Run {row.run_id} is {row.state}: nothing of it can be profiled",
            cure="Profile a run that goes on; kedro profile --last shows the newest trace there is",
        )
    before = {path.name for path in folder.traces.glob("step-*")}
    write_text(folder.profile, text=json.dumps({"steps": num_steps}) + "\n")
    tell(f"run {row.run_id} is asked to profile {num_steps} steps, after one that warms up")
    quiet_since_s, step = time.monotonic(), row.step
    while True:
        made = sorted({path.name for path in folder.traces.glob("step-*")} - before)
        if made:
            return _whole(folder, name=made[-1])
        now = read_row(folder.path)
        if now.step != step:
            quiet_since_s, step = time.monotonic(), now.step
        if not now.goes_on or time.monotonic() - quiet_since_s > _QUIET_S:
            folder.profile.unlink(missing_ok=True)
            raise RunError(
                f"Run {row.run_id} has written no trace: it is {now.state} at step {now.step}",
                cure="See its log: kedro logs " + row.run_id,
            )
        time.sleep(_POLL_S)


def _whole(folder: RunFolder, *, name: str) -> dict[int, Path]:
    """Wait until all ranks have written theirs, or none has for a while."""
    num_ranks = folder.read_spec().placement.layout.world_size
    found: dict[int, Path] = {}
    since_s = time.monotonic()
    while len(found) < num_ranks and time.monotonic() - since_s < _QUIET_S / 10:
        paths = sorted((folder.traces / name).glob("rank-*.json.gz"))
        if len(paths) != len(found):
            since_s = time.monotonic()
            found = find_traces(folder.traces)
        time.sleep(_POLL_S)
    return found


def draw_summary(summary: TraceSummary) -> list[Table | Text]:
    """Draw what a trace says: where the time went, by class and by operator."""
    whose = "device" if summary.on_device else "host"
    per_step = summary.span_s / max(1, summary.num_steps)
    head = Text(
        f"rank {summary.rank}: {summary.num_steps} steps of {format_seconds(per_step)}, by the "
        f"{whose}'s clock"
    )
    rows = [
        ("computing", summary.busy_s),
        ("communication", summary.communication_s),
        ("communication, exposed", summary.exposed_s),
        ("nothing runs", summary.idle_s),
        *((f"phase {name}", seconds) for name, seconds in _longest(summary.phases_s)),
    ]
    if summary.small_s is not None:
        rows.append(
            (f"{format_count(summary.num_small or 0)} kernels under 10 us", summary.small_s)
        )
    shares = _table("", "seconds", "share")
    for name, seconds in rows:
        shares.add_row(name, f"{seconds:.4f}", _share(seconds, summary=summary))
    return [
        head,
        shares,
        _operators("class", found=summary.classes, summary=summary),
        _operators("operator", found=summary.operators, summary=summary),
        Text(f"all of it: {plain(summary.path)} (ui.perfetto.dev, chrome://tracing)"),
    ]


def _operators(title: str, *, found: Sequence[Operator], summary: TraceSummary) -> Table:
    table = _table(title, "seconds", "share", "calls")
    for each in found:
        name = plain(each.name)
        short = name if len(name) <= _MOST_CHARS else f"{name[: _MOST_CHARS - 1]}…"
        cells = (f"{each.seconds:.4f}", _share(each.seconds, summary=summary), str(each.count))
        table.add_row(Text(short), *cells)
    return table


def _table(title: str, *numbers: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(title, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right")
    return table


def _share(seconds: float, *, summary: TraceSummary) -> str:
    return f"{seconds / summary.span_s:.1%}" if summary.span_s else ""


def _longest(seconds: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])
