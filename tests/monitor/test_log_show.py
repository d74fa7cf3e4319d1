from __future__ import annotations

import pytest

from diptych.core.errors import RunError
from diptych.monitor.log_show import find_logs, merge_lines, read_lines
from tests.monitor.folders import make_run, write_log


def test_the_newest_start_is_shown_or_the_one_named(tmp_path):
    run = make_run(tmp_path, "aaaa")
    write_log(run, 0, "first\n", launch=0)
    write_log(run, 0, "second\n", launch=2)
    assert find_logs(run).path(0).read_text() == "second\n"
    assert find_logs(run, launch=0).path(0).read_text() == "first\n"
    with pytest.raises(RunError, match=r"aaaa has no launch 1. There are 0, 2"):
        find_logs(run, launch=1)


def test_a_rank_without_a_log_is_told_which_there_are(tmp_path):
    run = make_run(tmp_path, "aaaa")
    with pytest.raises(RunError, match=r"no log of rank 0. It is empty"):
        find_logs(run).path(0)
    (run / "logs/attempt-000/launcher.log").touch()
    with pytest.raises(RunError, match=r"No rank came so far; there are launcher.log"):
        find_logs(run).path(0)
    for rank in (0, 1, 2):
        write_log(run, rank, "x\n")
    with pytest.raises(RunError, match=r"There are those of rank 0 to 2"):
        find_logs(run).path(3)
    write_log(run, 7, "x\n")
    with pytest.raises(RunError, match=r"There are those of rank 0, 1, 2, 7"):
        find_logs(run).path(3)


def test_a_run_that_was_never_started_says_so(tmp_path):
    with pytest.raises(RunError, match="No rank of run aaaa has been started"):
        find_logs(tmp_path / "aaaa")


def _at(second, text):
    return f"2026-11-30 21:06:{second:02d},000 INFO x {text}\n"


def test_ranks_are_merged_by_time_and_lines_stay_together(tmp_path):
    run = make_run(tmp_path, "aaaa")
    paths = {
        0: write_log(run, 0, "early\n" + _at(1, "a") + "  more of a\n" + _at(5, "d")),
        1: write_log(run, 1, _at(2, "b") + _at(3, "c") + "Traceback\n  File\n" + _at(9, "e")),
    }
    found = merge_lines(
        [
            (rank, read_lines(path, num_lines=None, end=path.stat().st_size))
            for rank, path in paths.items()
        ]
    )
    assert [(rank, line.decode().rpartition("x ")[2]) for rank, line in found] == [
        (0, "early"),
        (0, "a"),
        (0, "  more of a"),
        (1, "b"),
        (1, "c"),
        (1, "Traceback"),
        (1, "  File"),
        (0, "d"),
        (1, "e"),
    ]


def test_no_more_is_read_than_up_to_a_byte(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthree\n")
    assert list(read_lines(path, num_lines=None, end=8)) == [b"one", b"two"]
    assert list(read_lines(path, num_lines=1, end=8)) == [b"two"]
