"""Runs, checks and losses as a person sees them on a terminal: records in, rich's renderables out.

Everything that came from files is text here, never markup or escape codes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console
from rich.table import Table
from rich.text import Text

from diptych.core.records import Check, CheckStatus, RunRow, RunState
from diptych.core.terminal import plain
from diptych.core.units import format_count, format_seconds

_STYLES: dict[RunState, str] = {
    "running": "green",
    "starting": "green",
    "queued": "cyan",
    "finished": "",
    "stopped": "yellow",
    "failed": "red",
    "lost": "red",
    "damaged": "red",
    "checked": "dim",
}
_CHECK_STYLES: dict[CheckStatus, str] = {
    "pass": "green",
    "warn": "yellow",
    "fail": "red",
    "skip": "dim",
}
_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII = " .:-=+*%#"
_PIPE_WIDTH = 200


def make_console() -> Console:
    """Return the console; where it is no terminal lines are long, so that nothing is cut."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(console.width, _PIPE_WIDTH))
    return console


@dataclass(frozen=True)
class _Column:
    """One column of the table of runs; those of low rank go first where it is narrow."""

    title: str
    rank: int
    cell: Callable[[RunRow], str]
    is_number: bool = False


def runs_table(rows: Sequence[RunRow], *, width: int, now_s: float | None = None) -> Table:
    """Draw runs, one a line, with as many columns as fit."""
    columns = _columns(time.time() if now_s is None else now_s)
    cells = {column.title: [plain(column.cell(row)) for row in rows] for column in columns}
    while len(columns) > 3 and _width(columns, cells=cells) > width:
        columns.remove(max(columns, key=lambda column: column.rank))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        justify = "right" if column.is_number else "left"
        table.add_column(column.title, justify=justify, no_wrap=True, overflow="ellipsis")
    for number, row in enumerate(rows):
        table.add_row(*_draw(row, columns=columns, cells=cells, number=number))
    return table


def _draw(
    row: RunRow, *, columns: Sequence[_Column], cells: dict[str, list[str]], number: int
) -> list[Text]:
    return [Text(cells[column.title][number], style=_style(column, row=row)) for column in columns]


def _columns(now_s: float) -> list[_Column]:
    return [
        _Column("run", 0, lambda row: f"{row.stage}/{row.run_id}" if row.stage else row.run_id),
        _Column("state", 1, lambda row: row.state),
        _Column("step", 2, lambda row: f"{_or(row.step)}/{_or(row.num_steps)}", is_number=True),
        _Column("loss", 4, lambda row: _loss(row.loss), is_number=True),
        _Column("held-out", 6, lambda row: _loss(row.heldout_loss), is_number=True),
        _Column("tokens/s", 7, lambda row: _rate(row.tokens_per_s), is_number=True),
        _Column("where", 5, place),
        _Column("moved", 3, lambda row: ago(row.moved_s, now_s=now_s)),
    ]


def problems(rows: Sequence[RunRow]) -> list[str]:
    """Say in a line each what is wrong with runs that are damaged or lost."""
    return [plain(f"{row.run_id} is {row.state}: {row.problem}") for row in rows if row.problem]


def checks_table(checks: Sequence[Check]) -> Table:
    """Draw checks, one a line, each cure below what it cures."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("check", "", "found", "by"):
        table.add_column(title, overflow="fold", no_wrap=title in ("check", ""))
    for check in checks:
        found = Text("\n".join(map(plain, check.found.splitlines())))
        if check.cure and check.status in ("warn", "fail"):
            found.append(f"\n{plain(check.cure)}", style="bold")
        status = Text(check.status, style=_CHECK_STYLES[check.status])
        table.add_row(Text(check.name), status, found, Text(plain(check.where), style="dim"))
    return table


def plot(values: Sequence[float], *, width: int, height: int, encoding: str = "utf-8") -> list[str]:
    """Draw values as columns of blocks, from the left to the right, with their range at the side.

    Args:
        values: in order; several that share a column are averaged.
        width: columns, at most.
        height: lines.
        encoding: of the terminal; without blocks it gets ASCII.
    """
    if not values:
        return []
    blocks = _BLOCKS if encoding.lower().startswith("utf") else _ASCII
    means = _means(values, num=min(width, len(values)))
    low, high = min(means), max(means)
    span, most = (high - low) or 1.0, len(blocks) - 1
    levels = [1 + round((mean - low) / span * (height * most - 1)) for mean in means]
    sides = {height - 1: f"{high:.4g}"} | ({0: f"{low:.4g}"} if height > 1 else {})
    lines = []
    for line in reversed(range(height)):
        row = "".join(blocks[min(max(level - line * most, 0), most)] for level in levels)
        lines.append(f"{sides.get(line, ''):>8} {row}".rstrip())
    return lines


def _means(values: Sequence[float], *, num: int) -> list[float]:
    """Average values in so many parts of near-equal length."""
    bounds = [len(values) * each // num for each in range(num + 1)]
    return [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(bounds)]


def place(row: RunRow) -> str:
    """Say where a run's ranks were started: by what, under which id, from which host."""
    job = f" {row.job_id}" if row.job_id else ""
    host = f" {row.host}" if row.host else ""
    return f"{row.kind}{job}{host}" if row.kind else ""


def ago(moment_s: float | None, *, now_s: float) -> str:
    """Say how long ago something was."""
    return "" if moment_s is None else f"{format_seconds(max(0.0, now_s - moment_s))} ago"


def _width(columns: Sequence[_Column], *, cells: dict[str, list[str]]) -> int:
    return sum(2 + max([len(column.title), *map(len, cells[column.title])]) for column in columns)


def _style(column: _Column, *, row: RunRow) -> str:
    return _STYLES[row.state] if column.title == "state" else ""


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _rate(value: float | None) -> str:
    return "" if value is None else format_count(value)


def _or(value: int | None) -> str:
    return "-" if value is None else str(value)
