"""Ctrl-C, SIGTERM and kills of real processes: no orphan, a sound checkpoint, the same run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from diptych.monitor.run_folder import RunFolder
from diptych.parallel import storage

pytestmark = pytest.mark.slow
LIMIT_S = 120


def _wait_for(condition, what, limit_s=LIMIT_S):
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(0.05)
    return value


def _folder(project):
    folders = list((project.path / "data/06_models/runs").glob("*"))
    return RunFolder(folders[0]) if folders else None


def _num_steps(project):
    folder = _folder(project)
    return len(folder.read_steps()) if folder else 0


def _ranks(project):
    """Every process that works on this project's run, but for the test itself."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "cwd"]):
        line = process.info["cmdline"] or []
        ours = process.info["cwd"] == str(project.path)
        if ours and any("diptych.worker" in part for part in line):
            found.append(process)
    return found


def _start(project, *arguments):
    return _popen(project, project.command("--pipelines=train", *arguments))


def _popen(project, command):
    with (project.path / "console.log").open("wb") as log:
        return subprocess.Popen(
            command,
            cwd=project.path,
            env=project.env,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _console(project):
    return (project.path / "console.log").read_text()


def _finish(project):
    done = project.run("--pipelines=train")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [record.step for record in _folder(project).read_steps()]
    assert steps == list(range(1, len(steps) + 1))
    run = _folder(project).read_run()
    assert run.num_steps == len(steps)
    return run


@pytest.fixture
def project(planned, tmp_path):
    return planned.copy(tmp_path / "a project")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_saves_and_leaves_no_orphan(project, number):
    kedro = _start(project)
    _wait_for(lambda: _num_steps(project) >= 5, "five steps")
    assert len(_ranks(project)) >= 3  # the launcher's child and two ranks
    os.kill(kedro.pid, number)
    assert kedro.wait(LIMIT_S) != 0
    assert "goes on from its newest checkpoint" in _console(project).replace("\n", " ")
    _wait_for(lambda: not _ranks(project), "the ranks' end", 10)
    stopped_at = _num_steps(project)
    newest = storage.list_checkpoints(_folder(project).checkpoints)[-1]
    storage.verify(newest)
    assert newest.name == f"step-{stopped_at:08d}"
    done = project.run("--pipelines=train")
    assert f"goes on from step {stopped_at}" in done.stdout
    run = _finish(project)
    assert run.num_attempts == 2
    attempts = _folder(project).attempts.read_text().splitlines()
    assert json.loads(attempts[1])["from_step"] == stopped_at


def test_a_killed_kedro_leaves_no_orphan(project):
    kedro = _start(project)
    _wait_for(lambda: _num_steps(project) >= 5, "five steps")
    kedro.kill()
    kedro.wait()
    _wait_for(lambda: not _ranks(project), "the ranks' end", 60)
    newest = storage.list_checkpoints(_folder(project).checkpoints)[-1]
    storage.verify(newest)
    _finish(project)


def test_a_killed_rank_is_started_again(project):
    kedro = _start(project)
    _wait_for(lambda: _num_steps(project) >= 25, "a checkpoint and more")
    ranks = [p for p in _ranks(project) if "torch.distributed.run" not in p.cmdline()]
    ranks[-1].kill()
    assert kedro.wait(LIMIT_S) == 0, _console(project)
    folder = _folder(project)
    attempts = [json.loads(line) for line in folder.attempts.read_text().splitlines()]
    assert [attempt["from_step"] for attempt in attempts] == [0, 20]
    steps = [record.step for record in folder.read_steps()]
    assert steps == list(range(1, 61))


def test_sigterm_to_dvc_stops_the_ranks(project):
    git = {"cwd": project.path, "check": True, "capture_output": True}
    subprocess.run(["git", "init", "-q"], **git)
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], **git)
    stage = f"exec '{sys.executable}' -m kedro run --env=tiny --pipelines=train"
    (project.path / "dvc.yaml").write_text(
        json.dumps({"stages": {"train": {"cmd": stage, "outs": ["data/06_models/run.json"]}}})
    )
    dvc = _popen(project, [sys.executable, "-m", "dvc", "repro", "train"])
    _wait_for(lambda: _num_steps(project) >= 5, "five steps")
    dvc.terminate()
    dvc.wait(LIMIT_S)
    _wait_for(lambda: not _ranks(project), "the ranks' end", 90)
    newest = storage.list_checkpoints(_folder(project).checkpoints)[-1]
    storage.verify(newest)
    _wait_for(lambda: not _kedros(project), "Kedro's end", 30)
    _finish(project)


def _kedros(project: object) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline", "cwd"])
        if process.info["cwd"] == str(project.path) and "kedro" in (process.info["cmdline"] or [])
    ]


def test_a_second_launch_of_a_running_run_is_refused(project):
    # Long enough not to end before the second one is there.
    steps = "--params=train.num_steps=5000"
    kedro = _start(project, steps)
    _wait_for(lambda: _num_steps(project) >= 1, "a step")
    second = project.run("--pipelines=train", steps)
    assert second.returncode != 0
    assert "is being trained by another process" in second.stdout + second.stderr
    os.kill(kedro.pid, signal.SIGTERM)
    kedro.wait(LIMIT_S)


def test_a_rank_that_is_killed_is_named(project):
    kedro = _start(project, "--params=train.max_restarts=0")
    _wait_for(lambda: _num_steps(project) >= 1, "a step")
    for rank in _ranks(project):
        if "torch.distributed.run" not in rank.cmdline():
            rank.send_signal(signal.SIGSEGV)
    assert kedro.wait(LIMIT_S) != 0
    console = _console(project)
    assert "failed (exit code 1)" in console
    assert re.search(r"Rank [01] was killed by SIGSEGV first", console), console
    assert _folder(project).read_status()["state"] == "failed"
