"""Lines of many ranks' logs: new ones only, bounded, and each warning once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from diptych.monitor.log_tail import LogTail, Warnings

STAMP = "2026-11-30 21:06:41,123 "


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def write(tmp_path):
    def append(rank, text):
        with (tmp_path / f"rank-{rank:05d}.log").open("ab") as file:
            file.write(text if isinstance(text, bytes) else text.encode())

    return append


def _texts(tail):
    return [(line.rank, line.text) for line in tail.read()]


def test_only_new_whole_lines_are_read(tmp_path, write):
    tail = LogTail(tmp_path)
    assert tail.read() == []
    write(0, "a\nb")
    write(11, "c\n")
    (tmp_path / "launcher.log").write_text("not a rank's\n")
    assert _texts(tail) == [(0, "a"), (11, "c")]
    assert _texts(tail) == []
    write(0, "ut\n")
    assert _texts(tail) == [(0, "but")]


def test_a_folder_that_comes_later_and_a_log_that_is_replaced(tmp_path, write):
    tail = LogTail(tmp_path / "later")
    assert tail.read() == []
    tail = LogTail(tmp_path)
    write(0, "long before\n")
    tail.read()
    (tmp_path / "rank-00000.log").write_text("new\n")
    assert _texts(tail) == [(0, "new")]


def test_from_now_on_shows_nothing_that_was_there(tmp_path, write):
    write(0, "old\nhalf")
    tail = LogTail(tmp_path, begin="now")
    assert tail.position(0) == 4
    write(0, " and half\nnew\n")
    assert _texts(tail) == [(0, "half and half"), (0, "new")]


def test_what_is_beyond_a_look_is_skipped_and_counted(tmp_path, write):
    tail = LogTail(tmp_path)
    num_bytes = 1_000_000
    write(0, b"x" * 99 + b"\n")
    write(0, (b"y" * 99 + b"\n") * (num_bytes // 100 - 1))
    lines = tail.read()
    assert tail.num_skipped_bytes == num_bytes - 64 * 1024
    assert 600 < len(lines) <= 656
    assert {line.text for line in lines} == {"y" * 99}


def test_a_line_without_end_takes_no_memory(tmp_path, write):
    tail = LogTail(tmp_path)
    for _ in range(20):
        write(0, b"z" * 60_000)
        assert tail.read() == []
    write(0, "\n")
    (line,) = tail.read()
    assert len(line.text) <= 2048


def _warnings(tmp_path):
    clock = Clock()
    return Warnings(LogTail(tmp_path), clock=clock), clock


def test_one_warning_of_many_ranks_is_said_once(tmp_path, write):
    warnings, clock = _warnings(tmp_path)
    for rank in range(64):
        write(rank, f"{STAMP}INFO diptych.worker begins\n")
        if rank != 1:
            write(rank, f"{STAMP}WARNING diptych.worker the disk is full\n")
    assert warnings.read() == []
    write(1, "2026-11-30 21:06:42,999 WARNING diptych.worker the disk is full\n")
    clock.now = 1.0
    assert warnings.read() == []
    clock.now = 2.0
    assert warnings.read() == ["[rank 0 and 63 others] WARNING diptych.worker the disk is full"]
    write(5, f"{STAMP}WARNING diptych.worker the disk is full\n")
    clock.now = 9.0
    assert warnings.read(last=True) == []


def test_a_traceback_is_its_last_line(tmp_path, write):
    warnings, _ = _warnings(tmp_path)
    write(3, "Traceback (most recent call last):\n  File x\n    y()\nValueError: one\n\n")
    write(3, "During handling of the above exception, another exception occurred:\n\n")
    write(3, "Traceback (most recent call last):\n  File x\nKeyError: 'two'\nvalue: not one\n")
    assert warnings.read(last=True) == ["[rank 3] ValueError: one", "[rank 3] KeyError: 'two'"]


def test_what_is_no_warning_is_not_said(tmp_path, write):
    warnings, _ = _warnings(tmp_path)
    write(0, f"{STAMP}INFO diptych.worker WARNING is only a word here\n")
    write(0, "ERROR without a time\nplain\n")
    write(0, "host:12:34 [0] NCCL INFO Channel 00\n")
    assert warnings.read(last=True) == []


def test_what_nccl_and_errors_say_is_said(tmp_path, write):
    warnings, _ = _warnings(tmp_path)
    write(0, "node-1:12:34 [2] NCCL WARN Call to ibv_reg_mr failed\n")
    write(1, f"{STAMP}CRITICAL x \x1b[2Jgone\n")
    write(2, f"{STAMP}ERROR y z\n")
    assert warnings.read(last=True) == [
        "[rank 0] NCCL WARN Call to ibv_reg_mr failed",
        "[rank 1] CRITICAL x gone",
        "[rank 2] ERROR y z",
    ]


def test_a_flood_is_cut_short(tmp_path, write):
    warnings, _clock = _warnings(tmp_path)
    for number in range(100):
        write(0, f"{STAMP}WARNING x number {number}\n")
    lines = warnings.read(last=True)
    assert lines[0] == "[rank 0] WARNING x number 0"
    assert lines[-1] == "(80 further warnings are in the logs)"
    assert len(lines) == 21


def test_the_worker_s_own_log_has_the_level(tmp_path):
    """What a rank's process writes through logging is what is looked for."""
    code = (
        "import logging, sys, pathlib\n"
        "from diptych import worker\n"
        "worker.run_training = lambda path: logging.getLogger('diptych.x').warning('careful')\n"
        f"worker.main(['train', 'run', {str(tmp_path)!r}])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert Warnings(LogTail(tmp_path)).read(last=True) == ["[rank 0] WARNING diptych.x careful"]
