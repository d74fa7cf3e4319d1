"""Slurm's time limit itself: its warning comes to the job, which goes on after it."""

from __future__ import annotations

import pytest

from tests.slurm.conftest import Follower, losses, submit

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_a_run_goes_on_after_its_time_limit(cluster, make_run, tmp_path):
    # Slurm counts a limit in minutes, and looks twice a minute.
    spec = make_run(num_steps=1500, slurm={"time": "00:10:00", "warn_s": 60})
    folder, job = submit(spec, runs=tmp_path)
    follower = Follower(job, folder=folder)
    follower.wait_for_step(10)
    cluster.ask("scontrol", "update", f"JobId={job.job_id}", "TimeLimit=1")
    follower.wait_for_news("was queued again (restart 1)")
    cluster.ask("scontrol", "update", f"JobId={job.job_id}", "TimeLimit=10")
    num_steps = len(folder.read_steps())
    assert folder.newest_checkpoint() == num_steps >= 10
    follower.wait_for_step(num_steps + 5)
    folder.stop.touch()
    assert follower.to_the_end() == 75
    steps = [step for step, _ in losses(folder)]
    assert steps == list(range(1, len(steps) + 1))
    assert [attempt["from_step"] for attempt in folder.read_attempts()] == [0, num_steps]
    assert job.why().startswith(f"Slurm job {job.job_id} was stopped")
