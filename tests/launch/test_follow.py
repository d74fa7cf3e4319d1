"""A job followed to its end: its steps, and its ranks' warnings once."""

from __future__ import annotations

from diptych.launch.follow import follow
from diptych.launch.process import StopSignals
from diptych.monitor.run_folder import RunFolder
from tests.monitor.folders import make_run, write_log

STAMP = "2026-11-30 21:06:41,123 "


class Job:
    job_id = None
    outlives = False

    def __init__(self, moments):
        self._moments = iter(moments)

    def poll(self):
        act = next(self._moments, None)
        if act is None:
            return 0
        act()
        return None

    def news(self):
        return []


class Shown:
    def __init__(self):
        self.steps = []
        self.said = []

    def show(self, record):
        self.steps.append(record.step)

    def say(self, text):
        self.said.append(text)


def test_warnings_of_ranks_are_said_once_and_old_ones_never(tmp_path):
    run = make_run(tmp_path, "aaaa")
    for rank in range(4):
        write_log(run, rank, f"{STAMP}WARNING x of an earlier start\n")

    def warn():
        for rank in range(4):
            write_log(run, rank, f"{STAMP}WARNING x masked a/1\n{STAMP}INFO x fine\n")

    shown = Shown()
    code = follow(
        Job([warn]),
        folder=RunFolder(run),
        stops=StopSignals(),
        progress=shown,
        first_attempt=0,
        logs=run / "logs" / "attempt-000",
    )
    assert code == 0
    assert shown.steps == [1, 2, 3]
    assert shown.said == ["[rank 0 and 3 others] WARNING x masked a/1"]
