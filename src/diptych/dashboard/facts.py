"""What is told of runs in words: their settings and where these differ, attempts, alerts.

In: run folders. Out: rows of text, without what an address may hide.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diptych.core.terminal import plain
from diptych.dashboard.runs import read_alerts
from diptych.launch.changes import flatten, write_value
from diptych.monitor.run_folder import RunFolder

_PARTS = ("identity", "placement", "provenance")
_MOST_ROWS = 400
_MOST_EVENTS = 200


@dataclass(frozen=True)
class Words:
    """A table of words: a title, what its columns are, its rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    empty: str = ""


def compare_settings(runs: Mapping[str, RunFolder]) -> Words:
    """Lay the settings of runs side by side; of several only those that are not the same.

    Args:
        runs: folders by the name that a column gets.
    """
    flat = [read_settings(folder) for folder in runs.values()]
    names = list(dict.fromkeys(name for settings in flat for name in settings))
    rows = [
        (name, *(write_value(settings.get(name)) for settings in flat))
        for name in names
        if len(flat) == 1 or any(s.get(name) != flat[0].get(name) for s in flat)
    ]
    title = "Settings" if len(flat) == 1 else "Settings that differ"
    none = "run_spec.json is missing" if not any(flat) else "All settings are the same"
    return Words(title, ("setting", *runs), tuple(map(_plain, rows[:_MOST_ROWS])), none)


def read_settings(folder: RunFolder) -> dict[str, Any]:
    """Read a run's settings by dotted path; none where its spec cannot be read."""
    try:
        spec = json.loads((folder.path / "run_spec.json").read_text("utf-8"))
        return flatten({part: spec[part] for part in _PARTS if isinstance(spec.get(part), dict)})
    except (OSError, ValueError, AttributeError):
        return {}


def list_attempts(runs: Mapping[str, RunFolder]) -> Words:
    """List the attempts of runs: when each began, from which step, with what changed."""
    rows = []
    for name, folder in runs.items():
        for attempt in _attempts(folder):
            changes = attempt.get("changes")
            changed = "; ".join(map(str, changes)) if isinstance(changes, list) else ""
            number, step = attempt.get("attempt", ""), attempt.get("from_step", "")
            rows.append((name, str(number), _moment(attempt.get("started_s")), str(step), changed))
    columns = ("run", "attempt", "began", "from step", "what changed")
    return Words("Attempts", columns, tuple(map(_plain, rows[-_MOST_EVENTS:])), "No attempt yet")


def list_alerts(runs: Mapping[str, RunFolder]) -> Words:
    """List the alerts of runs, the newest first."""
    found = [(alert, name) for name, folder in runs.items() for alert in read_alerts(folder)]
    found.sort(key=lambda each: -each[0].time_s)
    rows = [
        (
            name,
            _moment(alert.time_s),
            str(alert.step),
            f"{alert.kind}, over" if alert.over else alert.kind,
            alert.text,
        )
        for alert, name in found[:_MOST_EVENTS]
    ]
    columns = ("run", "at", "step", "kind", "what")
    return Words("Alerts", columns, tuple(map(_plain, rows)), "No alert was given")


def _attempts(folder: RunFolder) -> Sequence[dict[str, Any]]:
    try:
        return [each for each in folder.read_attempts() if isinstance(each, dict)]
    except (OSError, ValueError):
        return []


def _moment(time_s: Any) -> str:
    if not isinstance(time_s, int | float) or not 0 <= time_s < 2**36:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def _plain(row: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(plain(" ".join(cell.split())) for cell in row)
