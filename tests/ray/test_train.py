"""Training on Ray Train: the same run as on this machine alone, whatever dies, and nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from diptych.core.errors import RunError
from diptych.core.records import Layout, NetworkSpec
from diptych.launch.launch import launch
from diptych.monitor.run_folder import RunFolder
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec

pytestmark = [pytest.mark.ray]
LAYOUT = Layout(engine="ddp", dp=2, micro_batch=4)
LIMIT_S = 90
DRIVER = """
import sys
from pathlib import Path
from diptych.core.records import RunSpec
from diptych.launch.launch import launch
spec = RunSpec.model_validate_json(Path(sys.argv[1]).read_text())
launch(spec, Path(spec.placement.sample_costs), Path(spec.placement.shards), sys.argv[2])
"""


def _spec(corpus, *, num_steps=8, restarts=0, kind="ray", timeout_s=60.0, **ray):
    """Make a run that saves every four steps."""
    spec = make_spec(
        corpus,
        layout=LAYOUT,
        model=TINY_MODEL,
        schedule=TINY_SCHEDULE,
        num_steps=num_steps,
        checkpoint_every_steps=4,
        heldout_every_steps=1000,
    )
    started_by = spec.placement.launch.model_copy(
        update={
            "kind": kind,
            "start_timeout_s": timeout_s,
            "ray": spec.placement.launch.ray.model_copy(update=ray),
        }
    )
    placement = spec.placement.model_copy(update={"launch": started_by, "max_restarts": restarts})
    return spec.model_copy(update={"placement": placement})


def _launch(spec, corpus, folder):
    launch(spec, corpus.sample_costs, corpus.shards, str(folder))
    return [(step.step, step.loss) for step in RunFolder(folder / spec.run_id).read_steps()]


def _wait_for(condition, what):
    deadline = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(0.02)
    return value


def _ranks(run: RunFolder) -> dict[int, psutil.Process]:
    """The processes of a run's ranks, by rank."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "diptych.worker" in line and str(run.path.absolute()) in line:
            with_rank = process.environ()
            found[int(with_rank["RANK"])] = process
    return found


def _attempt(run: RunFolder, *, number: int, num_steps: int) -> bool:
    """Whether the ranks were started so often, and their last start has come so far."""
    return run.count_attempts() == number and len(run.read_steps()) >= num_steps


@contextmanager
def _meanwhile(act):
    """Do something beside the block; what it raises fails the test."""
    failures = []

    def run():
        try:
            act()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


@pytest.fixture(scope="module")
def losses(corpus, tmp_path_factory):
    """What the same run of 60 steps comes to with ranks of this machine."""
    spec = _spec(corpus, num_steps=60, kind="local")
    return _launch(spec, corpus, tmp_path_factory.mktemp("local"))


def test_a_rank_and_a_worker_that_are_killed_leave_the_run_the_same(
    corpus, tmp_path, two_nodes, losses
):
    spec = _spec(corpus, num_steps=60, restarts=2, address=two_nodes, placement="STRICT_SPREAD")
    run = RunFolder(tmp_path / spec.run_id)

    def kill_both():
        _wait_for(lambda: _attempt(run, number=1, num_steps=6), "steps of the first start")
        ranks = _ranks(run)
        assert sorted(ranks) == [0, 1]
        ranks[1].kill()
        _wait_for(lambda: _attempt(run, number=2, num_steps=20), "steps of the second start")
        # The process of Ray's: its rank goes with it.
        _ranks(run)[0].parent().kill()

    with _meanwhile(kill_both):
        found = _launch(spec, corpus, tmp_path)
    assert found == losses
    assert [step for step, _ in found] == list(range(1, 61))
    attempts = run.read_attempts()
    assert len(attempts) == 3
    assert [attempt["from_step"] % 4 for attempt in attempts] == [0, 0, 0]
    assert attempts[1]["from_step"] >= 4
    assert attempts[2]["from_step"] >= 16
    notes = "".join(path.read_text() for path in run.logs.glob("*/notes.jsonl"))
    assert "was killed by SIGKILL: restart 1 of 2" in notes
    assert "rank 0 was lost with its Ray worker" in notes
    assert not _ranks(run)


def test_a_rank_that_raises_is_quoted(corpus, tmp_path, two_nodes):
    spec = _spec(corpus, address=two_nodes)
    network = NetworkSpec(variables={"GLOO_SOCKET_IFNAME": "absent0"})
    started_by = spec.placement.launch.model_copy(update={"network": network})
    placement = spec.placement.model_copy(update={"launch": started_by})
    with pytest.raises(RunError, match=r"Rank \d ended with exit code 1 first") as error:
        _launch(spec.model_copy(update={"placement": placement}), corpus, tmp_path)
    assert "absent0" in str(error.value)


def test_a_cluster_without_room_is_refused_in_time(corpus, tmp_path, two_nodes):
    spec = _spec(corpus, address=two_nodes, cpus_per_rank=2.0, timeout_s=3.0)
    started = time.monotonic()
    with pytest.raises(RunError) as error:
        _launch(spec, corpus, tmp_path)
    assert time.monotonic() - started < LIMIT_S
    said = str(error.value)
    assert "Ray has no room after 3 s for 2 ranks of 2 CPU each, placed PACK" in said
    assert said.count("127.0.0.1") == 2
    assert said.count("has 1 CPU") == 2
    assert "free of all is 2 CPU" in said


def _below(pid):
    """The child that drives the cluster, and all that it started."""
    for child in psutil.Process(pid).children():
        if "diptych.launch.ray_driver" in child.cmdline():
            return [child, *child.children(recursive=True)]
    raise AssertionError("no driver")


def _ray_folders():
    return {path.parent for path in Path("/tmp").glob("diptych-*/session_*")}


def test_a_stop_ends_a_local_cluster_and_nothing_is_left(corpus, tmp_path, ray_variables):
    spec = _spec(corpus, num_steps=500, address=None)
    run = RunFolder(tmp_path / spec.run_id)
    before = _ray_folders()
    family = []

    def stop():
        _wait_for(lambda: _attempt(run, number=1, num_steps=3), "steps")
        family.extend(_below(os.getpid()))
        family.extend(_ranks(run).values())
        run.stop.touch()

    with _meanwhile(stop), pytest.raises(RunError, match=r"stopped \(on request\) and saved"):
        _launch(spec, corpus, tmp_path)
    names = " ".join(part for process in family for part in _line(process))
    assert not names, f"left behind: {names}"
    assert len(family) >= 8
    assert _ray_folders() == before
    assert run.newest_checkpoint() == len(run.read_steps()) >= 3


def _line(process):
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.NoSuchProcess:
        return []


def test_a_driver_that_is_killed_takes_its_cluster_with_it(corpus, tmp_path, ray_variables):
    spec = _spec(corpus, num_steps=500, address=None)
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    run = RunFolder(tmp_path / "runs" / spec.run_id)
    before = _ray_folders()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "spec.json"), str(tmp_path / "runs")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(lambda: _attempt(run, number=1, num_steps=3), "steps")
        family = _below(driver.pid)
        listening = {
            connection.laddr.ip
            for process in family
            for connection in process.net_connections()
            if connection.status == psutil.CONN_LISTEN
        }
        os.kill(driver.pid, signal.SIGKILL)
        _wait_for(lambda: not any(_line(process) for process in family), "the cluster's end")
    finally:
        driver.kill()
        driver.wait()
    assert _ray_folders() == before
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert len(listening) >= 1
    assert run.read_status()["state"] == "stopped"
    assert run.newest_checkpoint() == len(run.read_steps()) >= 3
