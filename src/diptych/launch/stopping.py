"""Ask a run to stop from outside: its row in, what will happen in words out.

The file `stop` in its folder is all that ranks need; a job that still waits for a place is taken
back from its scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from diptych.core.records import Launched, RunRow
from diptych.core.units import format_seconds
from diptych.launch.job import launcher
from diptych.monitor.run_folder import RunFolder
from diptych.monitor.runs import read_row

_POLL_S = 0.5


def request_stop(row: RunRow) -> str:
    """Ask a run to save and stop; returns what happens now.

    Raises:
        RunError: its scheduler does not answer.
    """
    folder = RunFolder(Path(row.folder))
    name = row.run_id
    if row.state == "lost":
        folder.stop.touch()
        quiet_s = time.time() - (row.moved_s or 0.0)
        return (
            f"Run {name} is lost: {row.problem} ({format_seconds(quiet_s)}). Ranks of it that may "
            "still be there are asked to save and stop"
        )
    if not row.goes_on:
        return f"Run {name} is not going: it is {row.state}. Nothing was done"
    launched = folder.read_launched()
    if row.state == "queued" and _take_back(launched):
        folder.write_status("stopped", step=row.step or 0, num_steps=row.num_steps)
        return f"Run {name} was still waiting: job {row.job_id} is cancelled"
    folder.stop.touch()
    at = f" at step {row.step} of {row.num_steps}" if row.step else ""
    return (
        f"Run {name} is asked to stop{at}: after the step that begins next its ranks save a "
        "checkpoint and end; kedro run goes on from there"
    )


def _take_back(launched: Launched | None) -> bool:
    return launched is not None and launcher(launched.kind).cancel_pending(launched)


def wait_for_end(row: RunRow, *, tell: Callable[[str], None]) -> RunRow:
    """Wait until a run no longer goes on; returns its row then."""
    told = ""
    while True:
        now = read_row(Path(row.folder))
        if not now.goes_on:
            return now
        place = f"step {now.step} of {now.num_steps}" if now.step else now.state
        if place != told:
            tell(place)
            told = place
        time.sleep(_POLL_S)
