"""The commands for whoever watches runs, over folders as ranks leave them."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from kedro.framework.startup import bootstrap_project

from diptych import cli as module
from diptych import commands
from diptych.core.errors import RunError
from diptych.core.records import Check, Preflight
from diptych.launch import local
from tests.monitor.folders import make_run, write_log

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def kedro(tmp_path):
    def call(*arguments):
        return CliRunner().invoke(module.cli, [*arguments, "--runs", str(tmp_path)], obj=None)

    return call


def _finish(folder, *, state="stopped"):
    status = {"state": state, "time_s": time.time()}
    (folder / "status.json").write_text(json.dumps(status))


def test_runs_are_listed(kedro, tmp_path):
    assert "There is no run in" in kedro("runs").output
    make_run(tmp_path, "aaaa")
    (tmp_path / "bbbb").mkdir()
    done = kedro("runs")
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines[0].split()[:3] == ["run", "state", "step"]
    assert sorted(line.split()[0] for line in lines[1:3]) == ["aaaa", "bbbb"]
    assert lines[3] == "bbbb is damaged: run_spec.json is missing"


def test_runs_as_json(kedro, tmp_path):
    make_run(tmp_path, "aaaa")
    (row,) = json.loads(kedro("runs", "--json").output)
    assert (row["run_id"], row["state"], row["step"], row["num_steps"]) == (
        "aaaa",
        "running",
        3,
        60,
    )


def test_a_run_is_asked_to_stop(kedro, tmp_path):
    folder = make_run(tmp_path, "aaaa")
    done = kedro("stop", "a")
    assert "Run aaaa is asked to stop at step 3 of 60" in done.output
    assert (folder / "stop").is_file()


def test_waiting_tells_how_it_ended(kedro, tmp_path):
    folder = make_run(tmp_path, "aaaa")

    def heed():
        while not (folder / "stop").exists():
            time.sleep(0.01)
        _finish(folder)

    ranks = threading.Thread(target=heed)
    ranks.start()
    done = kedro("stop", "newest", "--wait")
    ranks.join()
    assert done.output.splitlines()[-1] == "run aaaa is stopped at step 3 of 60"


@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_a_run_that_is_not_going_is_left_alone(kedro, tmp_path, state):
    folder = make_run(tmp_path, "aaaa", state=state)
    done = kedro("stop", "aaaa", "--wait")
    assert done.output == f"Run aaaa is not going: it is {state}. Nothing was done\n"
    assert not (folder / "stop").exists()


def test_a_lost_run_is_asked_and_said_to_be_lost(kedro, tmp_path):
    launched = {"kind": "slurm", "job_id": "17"}
    folder = make_run(tmp_path, "aaaa", moved_s=time.time() - 5000, launched=launched)
    assert "Run aaaa is lost: nothing of it has moved since (1 h 23 min)" in (
        kedro("stop", "aaaa").output
    )
    assert (folder / "stop").is_file()


@pytest.fixture
def waiting(tmp_path):
    launched = {"kind": "slurm", "job_id": "17"}
    return make_run(tmp_path, "aaaa", state="starting", num_records=0, launched=launched)


def test_a_job_that_waits_is_taken_back(kedro, waiting, monkeypatch):
    taken = []
    monkeypatch.setattr(
        local, "cancel_pending", lambda launched: taken.append(launched.job_id) or True
    )
    monkeypatch.setattr("diptych.launch.stopping.launcher", lambda kind: local)
    done = kedro("stop", "aaaa")
    assert done.output == "Run aaaa was still waiting: job 17 is cancelled\n"
    assert taken == ["17"]
    assert json.loads((waiting / "status.json").read_text())["state"] == "stopped"
    assert not (waiting / "stop").exists()


def test_a_job_that_began_meanwhile_is_asked(kedro, waiting, monkeypatch):
    monkeypatch.setattr(local, "cancel_pending", lambda launched: False)
    monkeypatch.setattr("diptych.launch.stopping.launcher", lambda kind: local)
    assert "is asked to stop: after the step" in kedro("stop", "aaaa").output
    assert (waiting / "stop").is_file()


def test_an_unknown_run_is_a_short_error(kedro, tmp_path):
    make_run(tmp_path, "aaaa")
    for command in ("watch", "stop", "logs"):
        done = kedro(command, "x")
        assert done.exit_code == 1
        assert "RunError: No run in" in done.output
        assert "Traceback" not in done.output


def test_a_rank_s_log_is_shown(kedro, tmp_path):
    folder = make_run(tmp_path, "aaaa")
    write_log(folder, 0, "one\ntwo\nthree\n")
    write_log(folder, 3, "of three\n")
    assert kedro("logs", "aaaa").output == "one\ntwo\nthree\n"
    assert kedro("logs", "aaaa", "--tail", "2").output == "two\nthree\n"
    assert kedro("logs", "aaaa", "--rank", "3").output == "of three\n"
    everything = kedro("logs", "aaaa", "--all", "--tail", "1").output
    assert everything == "[rank 0] three\n[rank 3] of three\n"
    done = kedro("logs", "aaaa", "--rank", "1")
    assert done.exit_code == 1
    assert "has no log of rank 1. There are those of rank 0, 3" in done.output


def test_a_log_is_followed_to_the_run_s_end(kedro, tmp_path, monkeypatch):
    folder = make_run(tmp_path, "aaaa")
    write_log(folder, 0, "before\nhal")
    later = iter([lambda: write_log(folder, 0, "f\nnew\n"), lambda: _finish(folder)])
    monkeypatch.setattr(commands.time, "sleep", lambda _s: next(later, lambda: None)())
    assert kedro("logs", "aaaa", "--follow").output == "before\nhalf\nnew\n"


def test_escape_codes_go_into_a_pipe_and_not_onto_a_terminal(tmp_path, monkeypatch, capsys):
    folder = make_run(tmp_path, "aaaa")
    write_log(folder, 0, "\x1b]0;owned\x07x\x1b[31my\n")
    options = {"rank": 0, "of_all": False, "launch": None, "tail": None, "follow": False}
    commands.show_logs(folder, **options)
    assert capsys.readouterr().out == "\x1b]0;owned\x07x\x1b[31my\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    commands.show_logs(folder, **options)
    assert capsys.readouterr().out == "xy\n"


def test_watching_prints_lines_into_a_pipe_until_the_end(kedro, tmp_path, monkeypatch):
    folder = make_run(tmp_path, "aaaa")
    stamp = "2026-11-30 21:06:41,123 "

    def later(_s):
        write_log(folder, 1, f"{stamp}WARNING diptych.worker careful\n")
        _finish(folder, state="failed")

    monkeypatch.setattr("diptych.watching.time.sleep", later)
    done = kedro("watch", "aaaa")
    assert done.exit_code == 0
    assert done.output.splitlines() == [
        "run aaaa  running  step 3/60  loss 0.3333  held-out 0.2500  200 tokens/s  0.5 s/step  "
        "28.5 s left",
        "[rank 1] WARNING diptych.worker careful",
        "run aaaa  failed  step 3/60  loss 0.3333  held-out 0.2500  200 tokens/s  0.5 s/step",
    ]


def test_watching_ends_with_ctrl_c(kedro, tmp_path, monkeypatch):
    make_run(tmp_path, "aaaa")

    def interrupt(_s):
        raise KeyboardInterrupt

    monkeypatch.setattr("diptych.watching.time.sleep", interrupt)
    done = kedro("watch", "aaaa")
    assert done.exit_code == 0
    assert done.output.splitlines()[-1] == "run aaaa is no longer watched"


def test_the_folders_of_runs_are_the_configuration_s(tmp_path):
    assert commands.run_folders(None, runs=tmp_path, env=None) == [tmp_path]
    bootstrap_project(ROOT)
    project = SimpleNamespace(project_path=ROOT)
    found = [os.fspath(path) for path in commands.run_folders(project, runs=None, env=None)]
    assert found[0].endswith("data/06_models/runs")


def test_a_failed_check_ends_with_an_exit_code(monkeypatch, tmp_path):
    def looked(status):
        check = Check(name="disk", status=status, found="as it is", cure="Free some room")
        preflight = Preflight(run_id="a", host="h", time_s=1.0, checks=(check,))
        monkeypatch.setattr(
            "diptych.checking.check_project",
            lambda project, **options: (preflight, tmp_path / "preflight.json"),
        )
        project = SimpleNamespace(project_path=tmp_path)
        return CliRunner().invoke(module.cli, ["check", "--no-ranks"], obj=project)

    assert looked("warn").exit_code == 0
    done = looked("fail")
    assert done.exit_code == 1
    assert "1 failed, 0 to look at" in done.output


def test_an_error_of_ours_is_short(monkeypatch, tmp_path):
    def refuse(project, **options):
        raise RunError("nothing to look at", cure="Train")

    monkeypatch.setattr("diptych.checking.check_project", refuse)
    project = SimpleNamespace(project_path=tmp_path)
    done = CliRunner().invoke(module.cli, ["check"], obj=project)
    assert (done.exit_code, done.output) == (1, "RunError: nothing to look at. Train.\n")


def test_a_parameter_that_is_no_yaml_is_refused():
    done = CliRunner().invoke(module.cli, ["run", "--params=train.fork_from=@3"])
    assert done.exit_code == 2
    assert "--params has a value that is no YAML" in done.output
    assert "Traceback" not in done.output
