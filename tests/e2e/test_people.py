"""What people type, in a project as they have it: check, then runs and logs of what was trained."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from diptych.monitor.run_folder import RunFolder
from tests.e2e.conftest import KEYS

pytestmark = pytest.mark.slow


@pytest.fixture
def project(planned, tmp_path):
    return planned.copy(tmp_path / "a project")


def _kedro(project, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "kedro", *arguments],
        cwd=project.path,
        env=project.env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def _folder(project):
    (folder,) = (project.path / "data/06_models/runs").glob("*")
    return folder


def test_a_project_is_checked_trained_and_listed(project):
    done = _kedro(project, "check", "--env=tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    preflight = json.loads((_folder(project) / "preflight.json").read_text())
    status = {check["name"]: check["status"] for check in preflight["checks"]}
    assert status["clocks"] == status["loading"] == status["all-reduce"] == "pass"
    assert not RunFolder(_folder(project)).steps.exists()
    done = project.run("--pipelines=train", "--params=train.num_steps=60")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(_kedro(project, "runs", "--env=tiny", "--json").stdout)
    assert (row["run_id"], row["state"], row["step"]) == (_folder(project).name, "finished", 60)
    assert "INFO diptych.worker attention: " in _kedro(project, "logs", "newest", "--rank=0").stdout
    said = "".join(path.read_text() for path in _folder(project).rglob("preflight*.json"))
    assert not any(key in said for key in KEYS.values())


def test_a_changed_shard_ends_with_an_exit_code(project):
    shard = sorted((project.path / "data/05_model_input/shards").rglob("*.tar"))[0]
    data = bytearray(shard.read_bytes())
    data[700] ^= 1
    shard.write_bytes(data)
    done = _kedro(project, "check", "--env=tiny", "--no-ranks")
    assert done.returncode == 1
    assert "changed since the manifest was written" in done.stdout.replace("\n", " ")
