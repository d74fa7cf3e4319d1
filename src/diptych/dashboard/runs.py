"""The runs that a page may show: folders of runs in, rows, paths and logs of them out.

A page names a run by its key, the folder's number and the run's name. Only a run that lies in one
of the folders has one, so no key leads elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from diptych.core.records import Alert, RunRow
from diptych.dashboard.columns import parse_samples, parse_steps
from diptych.dashboard.logs import Logs, Table
from diptych.monitor.run_folder import RunFolder
from diptych.monitor.runs import list_runs
from diptych.monitor.tails import last_lines, parse_objects

_FRESH_S = 1.5
_PATIENCE = 10.0
_ALERT_BYTES = 256 * 1024


class Runs:
    """The runs of some folders, as they were a moment ago."""

    def __init__(self, folders: Sequence[Path], *, logs: Logs) -> None:
        self.folders = [folder.absolute() for folder in folders]
        self._logs = logs
        self._lock = threading.Lock()
        self._rows: dict[str, RunRow] = {}
        self._listed_s = float("-inf")
        self._took_s = 0.0

    def rows(self) -> dict[str, RunRow]:
        """Return every run's row by its key, the one that moved last first.

        Listed anew where that was not a moment ago, or ten times as long as listing takes.
        """
        with self._lock:
            begin_s = time.monotonic()
            if begin_s - self._listed_s > max(_FRESH_S, _PATIENCE * self._took_s):
                rows = list_runs(self.folders)
                self._rows = {self._key(Path(row.folder)): row for row in rows}
                self._listed_s = time.monotonic()
                self._took_s = self._listed_s - begin_s
            return self._rows

    def find(self, key: str) -> RunFolder | None:
        """Return the folder of the run with a key; None where no run has it."""
        row = self.rows().get(key)
        return None if row is None else RunFolder(Path(row.folder))

    def steps(self, folder: RunFolder) -> tuple[Table, str]:
        """Return a run's steps, and a word that changes when there are more."""
        return self._logs.look(folder.steps, parse=parse_steps)

    def samples(self, folder: RunFolder, *, node: str | None) -> tuple[Table, str]:
        """Return the samples of one of a run's nodes; nothing of one that it does not have."""
        if node not in nodes_of(folder):
            return Table(), "none"
        return self._logs.look(folder.samples / f"{node}.jsonl", parse=parse_samples)

    def _key(self, path: Path) -> str:
        return f"{self.folders.index(path.parent)}/{path.name}"


def nodes_of(folder: RunFolder) -> list[str]:
    """Return the names of the nodes that were sampled."""
    return sorted(path.stem for path in folder.samples.glob("*.jsonl"))


def read_alerts(folder: RunFolder) -> tuple[Alert, ...]:
    """Read a run's last alerts, in order; what is no alert is left out."""
    found: list[Alert] = []
    for each in parse_objects(last_lines(folder.alerts, most_bytes=_ALERT_BYTES)):
        with suppress(ValueError):
            found.append(Alert.model_validate(each))
    return tuple(reversed(found))
