"""Runs on a real Slurm of two nodes: submitted, followed, warned, requeued, cancelled."""

from __future__ import annotations

import pytest

from diptych.core.errors import DiptychError, LayoutError, RunError
from diptych.core.records import Launched
from diptych.launch import slurm
from diptych.launch.array import launch_array
from diptych.launch.launch import launch
from diptych.monitor.run_folder import RunFolder
from tests.slurm.conftest import (
    STEPS,
    Follower,
    losses,
    processes_of,
    start_driver,
    submit,
    wait_for,
)

pytestmark = pytest.mark.slurm


def test_two_nodes_train_as_one_machine_does(cluster, make_run, corpus, tmp_path, capfd, expected):
    spec = make_run()
    runs = tmp_path / "a folder"
    run = launch(spec, corpus.sample_costs, corpus.shards, str(runs))
    assert "is running on n[1-2] (2 nodes)" in capfd.readouterr().out
    folder = RunFolder(runs / spec.run_id)
    assert run.num_steps == STEPS["num_steps"]
    assert losses(folder) == expected
    assert sorted(path.stem for path in folder.nodes.iterdir()) == ["n1", "n2"]
    launched = folder.read_launched()
    log = folder.path / launched.logs / f"slurm-{launched.job_id}.log"
    assert "the run is finished" in log.read_text()
    assert not cluster.ask("squeue", "-h")
    assert not processes_of(folder.path)


def test_what_slurm_interrupts_goes_on_exactly(cluster, make_run, tmp_path, expected):
    folder, job = submit(make_run(), runs=tmp_path)
    follower = Follower(job, folder=folder)

    follower.wait_for_step(10)
    cluster.ask("scancel", "--batch", "--signal=USR1", job.job_id)  # as before the time limit
    follower.wait_for_attempt(2)
    follower.wait_for_step(30)
    cluster.ask("scontrol", "requeue", job.job_id)
    follower.wait_for_attempt(3)
    follower.wait_for_step(50)
    cluster.ask("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    wait_for(lambda: "PENDING" in cluster.ask("squeue", "-h", "-o", "%T"), "its end")
    wait_for(lambda: not processes_of(folder.path), "its processes' end")
    cluster.ask("scontrol", "update", "nodename=n2", "state=resume")

    assert follower.to_the_end() == 0
    assert losses(folder) == expected
    for number in (1, 2, 3):
        assert f"job {job.job_id} was queued again (restart {number})" in follower.news
    starts = [attempt["from_step"] for attempt in folder.read_attempts()]
    assert len(starts) == 4
    # Warned, or told by SIGTERM, the ranks have saved; nothing else here makes a checkpoint.
    assert starts[0] == 0
    assert starts[1] >= 10
    assert starts[2] >= 30


def test_a_preempted_run_saves_and_goes_on(cluster, make_run, tmp_path, expected):
    folder, job = submit(make_run(), runs=tmp_path)
    follower = Follower(job, folder=folder)
    follower.wait_for_step(10)
    cluster.ask(
        *("sbatch", "-p", "urgent", "-N2", "--ntasks-per-node=1", "-c4"),
        *("-o", str(tmp_path / "urgent.log"), "--wrap", "sleep 1"),
    )
    assert follower.to_the_end() == 0
    assert losses(folder) == expected
    assert "Slurm warned at" in job.log.read_text()
    assert [attempt["from_step"] > 0 for attempt in folder.read_attempts()] == [False, True]


def test_ctrl_c_can_end_the_job_after_a_save(cluster, make_run, corpus, tmp_path):
    spec = make_run(slurm={"cancel_on_interrupt": True}, num_steps=2000)
    folder = RunFolder(tmp_path / spec.run_id)
    driver = start_driver(spec, corpus=corpus, runs=tmp_path)
    wait_for(lambda: len(folder.read_steps()) >= 5, "five steps")
    driver.interrupt()
    said = driver.last_words()
    assert f"Run {spec.run_id} was stopped (SIGINT) and saved" in said
    assert folder.newest_checkpoint() == len(folder.read_steps())
    assert not cluster.ask("squeue", "-h")
    assert not processes_of(folder.path)
    assert not folder.stop.exists()


def test_a_job_goes_on_without_its_driver(cluster, make_run, corpus, tmp_path, capfd, expected):
    spec = make_run(slurm={"options": {"begin": "now+1hour"}})
    folder = RunFolder(tmp_path / spec.run_id)
    first = start_driver(spec, corpus=corpus, runs=tmp_path)
    job_id = wait_for(folder.read_launched, "the job").job_id
    wait_for(lambda: f"job {job_id} is pending: BeginTime" in first.output(), "the driver's word")
    first.interrupt()
    assert f"is no longer followed (SIGINT); job {job_id} goes on" in first.last_words()
    second = start_driver(spec, corpus=corpus, runs=tmp_path)
    wait_for(lambda: f"follows slurm job {job_id}" in second.output(), "the second driver")
    second.kill()
    cluster.ask("scontrol", "update", f"JobId={job_id}", "StartTime=now")
    run = launch(spec, corpus.sample_costs, corpus.shards, str(tmp_path))
    assert f"follows slurm job {job_id}, which goes on" in capfd.readouterr().out
    assert run.num_attempts == 1
    assert losses(folder) == expected


def test_an_array_trains_a_run_a_task(cluster, make_run, tmp_path, capfd):
    specs = [make_run(num_nodes=1, num_steps=6, lr=lr) for lr in (1e-3, 3e-3)]
    folders = [RunFolder(tmp_path / spec.run_id) for spec in specs]
    assert launch_array(specs, runs=tmp_path, folder=tmp_path / "sweep")
    first, second = map(losses, folders)
    assert [step for step, _ in first] == [step for step, _ in second] == list(range(1, 7))
    assert first[0] == second[0]  # the same model and batch, before any update
    assert first[-1] != second[-1]
    ids = [folder.read_launched().job_id for folder in folders]
    assert [job_id.partition("_")[2] for job_id in ids] == ["0", "1"]
    said = capfd.readouterr().out
    assert all(f"run {folder.path.name}: finished" in said for folder in folders)
    # Finished runs are taken: nothing is submitted.
    (tmp_path / "sweep" / "slurm.sh").unlink()
    assert launch_array(specs, runs=tmp_path, folder=tmp_path / "sweep")
    assert not (tmp_path / "sweep" / "slurm.sh").exists()


def test_a_cancelled_job_leaves_nothing(cluster, make_run, tmp_path):
    folder, job = submit(make_run(), runs=tmp_path)
    follower = Follower(job, folder=folder)
    wait_for(lambda: len(processes_of(folder.path, what="diptych.worker")) >= 4, "the ranks")
    cluster.ask("scancel", job.job_id)
    assert follower.to_the_end() != 0
    assert f"Slurm job {job.job_id} was cancelled" in job.why()
    wait_for(lambda: not processes_of(folder.path), "its processes' end", limit_s=20)


def test_a_request_to_stop_is_heeded_before_it_begins(cluster, make_run, tmp_path):
    folder, job = submit(make_run(slurm={"options": {"begin": "now+1hour"}}), runs=tmp_path)
    folder.stop.touch()
    assert Follower(job, folder=folder).to_the_end() != 0
    assert "by the request to stop, before it began" in job.why()


def test_a_script_that_a_person_submits_is_followed(cluster, make_run, tmp_path):
    spec = make_run(slurm={"options": {"begin": "now+1hour"}})
    folder, job = submit(spec, runs=tmp_path)
    launched = Launched(
        kind="slurm", job_id=job.job_id, host="x", pid=1, started_s=0.0, logs="logs/attempt-000"
    )
    job.end()
    assert slurm.attach(launched, folder=folder) is None
    by_hand = cluster.ask("sbatch", "--parsable", str(folder.path / "slurm.sh"))
    assert slurm.attach(launched, folder=folder).job_id == by_hand
    with pytest.raises(RunError, match=f"job {by_hand} of run {spec.run_id} waits or runs already"):
        slurm.start(spec, folder=folder, logs=folder.logs)


def test_an_error_of_the_script_is_shown(cluster, make_run, corpus, tmp_path):
    spec = make_run(slurm={"setup": ("echo preparing", "no-such-command --now")})
    with pytest.raises(RunError, match="ended with exit code 127") as caught:
        launch(spec, corpus.sample_costs, corpus.shards, str(tmp_path))
    assert "no-such-command: command not found" in str(caught.value)
    assert "failed with exit code 127: no-such-command --now" in str(caught.value)


def test_a_controller_that_is_away_is_waited_for(cluster, make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "_SILENCE_S", 0.0)
    folder, job = submit(make_run(slurm={"options": {"begin": "now+1hour"}}), runs=tmp_path)
    follower = Follower(job, folder=folder)
    follower.wait_for_news("is pending: BeginTime")
    cluster.stop_controller()
    try:
        follower.wait_for_news("controller does not answer")
        with pytest.raises(DiptychError, match="controller does not answer"):
            slurm.start(make_run(), folder=folder, logs=folder.logs)
    finally:
        cluster.start_controller()
    follower.wait_for_news("answers again")
    job.end()
    assert job.poll() not in (None, 0)


@pytest.mark.parametrize(
    ("settings", "num_nodes", "error", "words"),
    [
        ({"partition": "mian"}, 2, RunError, "no partition 'mian'.*It has: main, urgent, short"),
        ({}, 3, LayoutError, "Partition main has 2 nodes, and train.launch.num_nodes is 3"),
        ({"partition": "short"}, 2, LayoutError, "Partition short has 1 nodes"),
        ({"partition": "short", "time": "00:11:00"}, 1, LayoutError, "short allows 00:10:00"),
        ({"constraint": "moon"}, 2, RunError, "sbatch refuses .*Invalid feature"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused(
    cluster, make_run, tmp_path, settings, num_nodes, error, words
):
    with pytest.raises(error, match=words):
        submit(make_run(num_nodes=num_nodes, slurm=settings), runs=tmp_path)
    assert not cluster.ask("squeue", "-h")
