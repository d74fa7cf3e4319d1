"""`kedro sweep` on this machine: a run for each combination, and a table."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from diptych.monitor.run_folder import RunFolder

pytestmark = pytest.mark.slow


def _sweep(project, *assignments):
    return subprocess.run(
        [sys.executable, "-m", "kedro", "sweep", *assignments, "--env=tiny"],
        cwd=project.path,
        env=project.env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_one_run_follows_the_other_and_a_table_says_how_they_ended(planned, tmp_path):
    project = planned.copy(tmp_path / "a project")
    done = _sweep(project, "train.seed=0,1", "train.num_steps=6")
    assert done.returncode == 0, done.stdout + done.stderr
    folders = sorted((project.path / "data/06_models/runs").iterdir())
    runs = [RunFolder(folder).read_run() for folder in folders]
    assert len(runs) == 2
    assert {RunFolder(folder).read_spec().identity.seed for folder in folders} == {0, 1}
    for run in runs:
        row = next(line for line in done.stdout.splitlines() if f"│ {run.run_id}" in line)
        assert re.search(rf"finished .* 6/6 .* {run.final_loss:.4f} ", row), row
    # What a release is made of is not the sweep's to choose.
    assert not (project.path / "data/06_models/run.json").exists()


def test_a_setting_that_makes_no_other_run_is_refused(planned, tmp_path):
    project = planned.copy(tmp_path / "a project")
    done = _sweep(project, "train.keep_checkpoints=1,2")
    assert done.returncode != 0
    assert "2 combinations are 1 runs" in done.stdout + done.stderr
