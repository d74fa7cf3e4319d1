"""What happens around a run: its start is noted, and its result is told on the console."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

from diptych.core.floors import check_floors
from diptych.core.records import Summary
from diptych.core.units import format_seconds

STARTED = "DIPTYCH_RUN_STARTED"
"""Environment variable: when this process began, in seconds since 1970; `report` reads it."""


class ProjectHooks:
    """Kedro's hooks of this project."""

    @hook_impl
    def after_context_created(self) -> None:
        """Note when the process began, so that the report can tell the whole run's time.

        A stage of DVC is a part of a run only: its time is not the run's, which is not measured.

        Raises:
            ConfigError: a package is installed in a version that has a known hole.
        """
        check_floors()
        if "DVC_STAGE" in os.environ:
            os.environ.pop(STARTED, None)
        else:
            os.environ[STARTED] = str(psutil.Process().create_time())

    @hook_impl
    def after_pipeline_run(self, pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Print the result, or where to look at the data if the run ended before training."""
        made = pipeline.all_outputs()
        if "summary" in made:
            _tell(catalog.load("summary"), page=_place(catalog.get("report")))
        elif "data_page" in made and "run" not in made:
            print(f"Look at the data: {_place(catalog.get('data_page'))}")  # noqa: T201


def _tell(summary: Summary, *, page: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, title="Result", title_justify="left")
    for label, value in _rows(summary, page=page):
        table.add_row(label, value)
    # Where no one looks at a terminal, lines stay whole.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _place(page: object) -> str:
    path = getattr(page, "path", None)
    assert isinstance(path, Path), "the catalog keeps pages in files"
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _rows(summary: Summary, *, page: str) -> list[tuple[str, str]]:
    return [
        *_scores(summary),
        ("parity, largest logit difference", _number(summary.parity_max_abs, form=".1e")),
        ("final loss", _loss(summary)),
        ("time", _time(summary)),
        ("release", summary.release or "not measured"),
        ("report", page),
    ]


def _scores(summary: Summary) -> list[tuple[str, str]]:
    """Tell the starter's main task, or all questions where the data are a person's own."""
    if summary.read_exact_match is None:
        what, blind = "exact match, all questions", summary.blind_exact_match
        bounds = (summary.exact_match, summary.exact_match_low, summary.exact_match_high)
    else:
        what, blind = "exact match, numbers of 1 to 4 digits", summary.blind_read_exact_match
        low, high = summary.read_exact_match_low, summary.read_exact_match_high
        bounds = (summary.read_exact_match, low, high)
    return [(what, _interval(*bounds)), ("the same without the images", _number(blind, form=".3f"))]


def _interval(value: float | None, low: float | None, high: float | None) -> str:
    text = _number(value, form=".3f")
    return text if low is None or high is None else f"{text} ({low:.3f} to {high:.3f})"


def _loss(summary: Summary) -> str:
    value = _number(summary.final_loss, form=".4f")
    return value if summary.num_steps is None else f"{value} ({summary.num_steps} steps)"


def _time(summary: Summary) -> str:
    made = "not measured" if summary.run_s is None else format_seconds(summary.run_s)
    if STARTED not in os.environ:
        return made
    took = time.time() - float(os.environ[STARTED])
    return f"{format_seconds(took)} (of the run that made it: {made})"


def _number(value: Any, *, form: str) -> str:
    return "not measured" if value is None else format(value, form)
