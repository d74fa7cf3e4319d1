"""A row per run, whatever is in its folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

import pytest

from diptych.core.errors import RunError
from diptych.monitor.runs import find_run, list_runs, read_row
from tests.monitor.folders import make_run


def _one(tmp_path):
    (row,) = list_runs([tmp_path])
    return row


def test_a_row_says_what_the_folder_says(tmp_path):
    make_run(tmp_path, "aaaa")
    row = _one(tmp_path)
    assert (row.run_id, row.state, row.step, row.num_steps) == ("aaaa", "running", 3, 60)
    assert row.loss == pytest.approx(1 / 3)
    assert row.heldout_loss == 0.25
    assert row.tokens_per_s == pytest.approx((100 + 200 + 300) / 3)
    assert (row.kind, row.stage, row.problem) == ("local", None, None)


@pytest.mark.parametrize("state", ["stopped", "failed", "starting"])
def test_the_state_is_what_the_run_said_last(tmp_path, state):
    make_run(tmp_path, "aaaa", state=state)
    assert _one(tmp_path).state == state


def test_a_finished_run_is_finished_whatever_its_status(tmp_path):
    facts = {"num_steps": 60, "final_loss": 0.5, "final_heldout_loss": 0.75}
    make_run(tmp_path, "aaaa", state="running", run=facts)
    row = _one(tmp_path)
    assert (row.state, row.step, row.heldout_loss) == ("finished", 60, 0.75)


def test_a_job_without_steps_waits_in_the_queue(tmp_path):
    launched = {"kind": "slurm", "job_id": "17"}
    folder = make_run(tmp_path, "aaaa", state="starting", num_records=0, launched=launched)
    row = _one(tmp_path)
    assert (row.state, row.job_id, row.goes_on) == ("queued", "17", True)
    (folder / "status.json").write_text(json.dumps({"state": "running", "time_s": time.time()}))
    assert _one(tmp_path).state == "running"


def test_what_has_not_moved_for_long_is_lost(tmp_path):
    launched = {"kind": "slurm", "job_id": "17"}
    now_s = 2_000_000_000.0
    folder = make_run(tmp_path, "aaaa", moved_s=now_s - 901, launched=launched)
    row = read_row(folder, now_s=now_s)
    assert (row.state, row.moved_s) == ("lost", now_s - 901)
    assert read_row(folder, now_s=now_s - 2).state == "running"


def test_slow_steps_are_given_their_time(tmp_path):
    launched = {"kind": "slurm", "job_id": "17"}
    now_s = 2_000_000_000.0
    folder = make_run(tmp_path, "aaaa", launched=launched)
    steps = folder / "steps.jsonl"
    steps.write_text(steps.read_text().replace('"step_s":0.5', '"step_s":60.0'))
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (now_s - 1500, now_s - 1500))
    (folder / "status.json").write_text(json.dumps({"state": "running", "time_s": 1.0}))
    os.utime(folder / "status.json", (1, 1))
    assert read_row(folder, now_s=now_s).state == "running"
    assert read_row(folder, now_s=now_s + 400).state == "lost"


def test_local_ranks_are_lost_with_their_driver(tmp_path):
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    make_run(tmp_path, "aaaa", launched={"pid": done.pid})
    row = _one(tmp_path)
    assert (row.state, row.problem) == ("lost", "the process that started it is gone")


def test_another_machine_s_driver_is_not_asked(tmp_path):
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    make_run(tmp_path, "aaaa", launched={"pid": done.pid, "host": "another"})
    assert _one(tmp_path).state == "running"


def test_a_number_that_another_process_has_now_is_no_driver(tmp_path):
    make_run(tmp_path, "aaaa", launched={"started_s": 1000.0})
    assert _one(tmp_path).state == "lost"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("run_spec.json", "{", "run_spec.json cannot be read: it is no JSON"),
        ("run_spec.json", "[1]", "run_spec.json cannot be read: it holds no fields"),
        ("run_spec.json", '{"identity": 3}', "no attribute 'get'"),
        ("status.json", "\x00", "status.json cannot be read: it is no JSON"),
        ("status.json", '{"state": "dancing"}', "status.json says 'dancing'"),
        ("launch.json", '{"kind": "local", "started_s": "x", "pid": "y"}', "validation|could not"),
        ("run.json", "", "run.json cannot be read"),
        ("steps.jsonl", '{"step": "many"}\n', "valid integer"),
        ("steps.jsonl", '{"step": 4, "tokens_per_s": "fast"}\n', "unsupported operand"),
    ],
)
def test_a_damaged_folder_is_a_row_that_says_so(tmp_path, name, content, said):
    folder = make_run(tmp_path, "aaaa")
    (folder / name).write_text(content)
    make_run(tmp_path, "bbbb")
    rows = {row.run_id: row for row in list_runs([tmp_path])}
    assert rows["bbbb"].state == "running"
    assert rows["aaaa"].state == "damaged"
    assert re.search(said, rows["aaaa"].problem), rows["aaaa"].problem


def test_folders_without_a_run(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "a file").touch()
    (tmp_path / "looked").mkdir()
    (tmp_path / "looked" / "preflight.json").write_text("{}")
    rows = {row.run_id: (row.state, row.problem) for row in list_runs([tmp_path])}
    assert rows == {
        "empty": ("damaged", "run_spec.json is missing"),
        "looked": ("checked", None),
    }
    assert list_runs([tmp_path / "absent"]) == []


def test_a_step_that_is_being_written_is_not_counted(tmp_path):
    folder = make_run(tmp_path, "aaaa")
    with (folder / "steps.jsonl").open("a") as steps:
        steps.write('{"step": 4, "lo')
    assert _one(tmp_path).step == 3


def test_only_the_end_of_a_long_log_is_read(tmp_path, monkeypatch):
    """A held-out loss long ago is not looked for in the whole log."""
    folder = make_run(tmp_path, "aaaa", num_records=5000)
    size = (folder / "steps.jsonl").stat().st_size
    read = []
    from diptych.monitor import runs

    last_lines = runs.last_lines

    def counted(path, *, most_bytes):
        lines = last_lines(path, most_bytes=most_bytes)
        read.append(sum(map(len, lines)))
        return lines

    monkeypatch.setattr(runs, "last_lines", counted)
    assert _one(tmp_path).step == 5000
    assert size > 2_000_000 > 600_000 > sum(read)


def test_the_one_that_moved_last_is_first(tmp_path):
    for name, moved_s in (("aaaa", 100.0), ("cccc", 300.0), ("bbbb", 200.0)):
        make_run(tmp_path, name, state="stopped", moved_s=moved_s)
    assert [row.run_id for row in list_runs([tmp_path])] == ["cccc", "bbbb", "aaaa"]
    assert find_run("newest", folders=[tmp_path]).run_id == "cccc"


def test_runs_of_stages_say_which(tmp_path):
    make_run(tmp_path / "stages" / "align" / "runs", "aaaa")
    make_run(tmp_path / "runs", "bbbb")
    rows = list_runs([tmp_path / "runs", tmp_path / "stages" / "align" / "runs"])
    assert {row.run_id: row.stage for row in rows} == {"aaaa": "align", "bbbb": None}


def test_a_beginning_that_fits_one_run_names_it(tmp_path):
    for name in ("abcd", "abce", "abce.old-1", "ffff"):
        make_run(tmp_path, name)
    assert find_run("f", folders=[tmp_path]).run_id == "ffff"
    assert find_run("abce", folders=[tmp_path]).run_id == "abce"
    with pytest.raises(RunError, match=r"'abc' is the beginning of 3 runs: .*Give more"):
        find_run("abc", folders=[tmp_path])
    with pytest.raises(RunError, match=r"begins with 'abcf'.*Did you mean 'abc[de]'"):
        find_run("abcf", folders=[tmp_path])
    with pytest.raises(RunError, match="There is no run in"):
        find_run("newest", folders=[tmp_path / "absent"])
