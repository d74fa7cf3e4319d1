"""A job followed to its end: its steps, and its ranks' warnings once."""

from __future__ import annotations

import errno
import signal
import tempfile

import pytest

from diptych.launch import follow as module
from diptych.launch import room
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


@pytest.fixture
def full(monkeypatch):
    """A disk that takes nothing more while this list holds a word."""
    said = []
    write = tempfile.NamedTemporaryFile

    def refuse(**options):
        if said:
            raise OSError(errno.ENOSPC, said[-1])
        return write(**options)

    monkeypatch.setattr(room.tempfile, "NamedTemporaryFile", refuse)
    monkeypatch.setattr(module, "_LOOK_AT_DISK_EVERY_S", 0.0)
    monkeypatch.setattr(module, "_NEWS_EVERY_S", 0.0)
    return said


def test_a_disk_that_fills_is_said_once_and_that_it_takes_files_again(tmp_path, full):
    run = make_run(tmp_path, "aaaa")
    shown = Shown()
    fill = lambda: full.append("No space left on device")  # noqa: E731
    follow(
        Job([fill, lambda: None, lambda: None, full.clear, lambda: None]),
        folder=RunFolder(run),
        stops=StopSignals(),
        progress=shown,
        first_attempt=0,
        logs=run / "logs" / "attempt-000",
    )
    assert shown.said == [
        f"The disk of {run} takes nothing more (No space left on device): steps wait in memory, "
        "and no checkpoint is kept. Free some room",
        f"The disk of {run} takes files again",
    ]


def test_a_stop_that_no_disk_takes_ends_the_ranks_at_once(tmp_path, monkeypatch):
    run = make_run(tmp_path, "aaaa")

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunFolder(run).stop.__class__, "touch", refuse)
    stops = StopSignals()
    shown = Shown()
    code = follow(
        Job([lambda: stops.on_signal(signal.SIGTERM, None), lambda: None, lambda: None]),
        folder=RunFolder(run),
        stops=stops,
        progress=shown,
        first_attempt=0,
        logs=run / "logs" / "attempt-000",
    )
    assert code == -1
    assert shown.said[-1] == f"{run} takes no file (No space left on device)"
