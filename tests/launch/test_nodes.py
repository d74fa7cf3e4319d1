"""Nodes on loopback: each a torch elastic of its own, started through a stand-in for ssh."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from diptych.core.errors import LayoutError, RunError
from diptych.core.records import Launched, LaunchSpec, Layout, NodesSpec
from diptych.launch import meeting, node, nodes
from diptych.launch.launch import launch
from diptych.launch.node import STOPPED
from diptych.launch.nodes import LOST_AFTER_S, NodesJob, attach, node_command
from diptych.monitor.run_folder import RunFolder
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec

LIMIT_S = 150.0
# Drops the host's name and has a shell run the rest, as sshd does.
SSH = "import subprocess, sys; sys.exit(subprocess.call(['sh', '-c', sys.argv[2]]))"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def spec_of(corpus, *, num_steps=6, min_nodes=None, **settings):
    """A run on two nodes of one rank each."""
    spec = make_spec(
        corpus,
        layout=Layout(engine="ddp", dp=2, micro_batch=4),
        model=TINY_MODEL,
        schedule=TINY_SCHEDULE,
        num_steps=num_steps,
    )
    nodes = NodesSpec(
        **{
            "hosts": ("one", "two"),
            "start": "ssh",
            "ssh": f'{sys.executable} -c "{SSH}"',
            "address": "127.0.0.1",
            "port": free_port(),
            **settings,
        }
    )
    spread = LaunchSpec(
        kind="nodes", num_nodes=2, min_nodes=min_nodes, nodes=nodes, start_timeout_s=60
    )
    placement = spec.placement.model_copy(update={"launch": spread, "max_restarts": 2})
    return spec.model_copy(update={"placement": placement})


def wait_for(condition, what):
    deadline = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(0.05)
    return value


def losses(folder):
    return [record.loss for record in folder.read_steps()]


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory):
    """The same run on this machine alone."""
    runs = tmp_path_factory.mktemp("reference")
    spec = make_spec(
        corpus,
        layout=Layout(engine="ddp", dp=2, micro_batch=4),
        model=TINY_MODEL,
        schedule=TINY_SCHEDULE,
    )
    run = launch(spec, corpus.sample_costs, corpus.shards, str(runs))
    return losses(RunFolder(Path(run.folder)))


def test_two_nodes_train_as_one_machine_does(corpus, tmp_path, reference, capfd):
    spec = spec_of(corpus)
    run = launch(spec, corpus.sample_costs, corpus.shards, str(tmp_path))
    folder = RunFolder(Path(run.folder))
    assert losses(folder) == reference
    notes = folder.read_nodes("attempt-000")
    assert [(note.name, note.exit_code) for note in notes] == [("one", 0), ("two", 0)]
    assert {path.name for path in folder.logs.glob("attempt-000/rank-*")} == {
        "rank-00000.log",
        "rank-00001.log",
    }
    assert "node two has joined (127.0.0.1)" in capfd.readouterr().out


def tree(pid):
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def kill_machine(note):
    """End all that runs on a node at once, as a power cut would."""
    for process in tree(note.pid):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP)
    for process in tree(note.pid):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def read_note(folder, name):
    return next((n for n in folder.read_nodes("attempt-000") if n.name == name), None)


class Driver(threading.Thread):
    """Launches a run beside the test."""

    def __init__(self, spec, corpus, runs):
        super().__init__(daemon=True)
        self._arguments = (spec, corpus.sample_costs, corpus.shards, str(runs))
        self.result = None
        self.start()

    def run(self):
        try:
            self.result = launch(*self._arguments)
        except Exception as error:  # shown by the test
            self.result = error

    def wait(self):
        self.join(LIMIT_S)
        assert not self.is_alive(), "the driver goes on"
        return self.result


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_nodes_and_with_more(corpus, tmp_path):
    num_steps = 900
    spec = spec_of(corpus, num_steps=num_steps, min_nodes=1)
    whole = spec.model_copy(
        update={"placement": spec.placement.model_copy(update={"checkpoint_every_steps": 20})}
    )
    driver = Driver(whole, corpus, tmp_path)
    folder = RunFolder(tmp_path / spec.run_id)

    def attempts():
        return folder.read_attempts() if folder.attempts.exists() else []

    def world_size(attempt):
        layout = attempt["placement"]["layout"]
        return layout["dp"] * layout["shard"]

    wait_for(folder.newest_checkpoint, "the first checkpoint")
    kill_machine(read_note(folder, "two"))
    wait_for(lambda: len(attempts()) == 2, "the rest of the nodes")
    first = folder.newest_checkpoint()
    wait_for(lambda: folder.newest_checkpoint() > first, "a checkpoint of one node")
    line = node_command(
        whole.placement.launch, run=folder.path, logs=folder.logs / "attempt-000", number=1
    )
    again = psutil.Popen(["sh", "-c", line])
    run = driver.wait()
    assert again.wait(30) == 0
    if isinstance(run, Exception):
        raise run
    assert [world_size(attempt) for attempt in attempts()] == [2, 1, 2]
    assert [record.step for record in folder.read_steps()] == list(range(1, num_steps + 1))
    assert attempts()[1]["changes"] == ["layout.dp: 2 -> 1"]
    alone = make_spec(
        corpus,
        layout=Layout(micro_batch=4),
        model=TINY_MODEL,
        schedule=TINY_SCHEDULE,
        num_steps=num_steps,
        checkpoint_every_steps=num_steps,
    )
    reference = launch(alone, corpus.sample_costs, corpus.shards, str(tmp_path / "alone"))
    # Over both changes; later, rounding has grown whatever ranks there are.
    num_compared = attempts()[2]["from_step"] + 20
    expected = losses(RunFolder(Path(reference.folder)))[:num_compared]
    np.testing.assert_allclose(losses(folder)[:num_compared], expected, rtol=1e-4)


@pytest.mark.slow
def test_a_node_that_is_told_to_end_leaves_the_run_to_the_others(corpus, tmp_path):
    spec = spec_of(corpus, num_steps=300, min_nodes=1)
    driver = Driver(spec, corpus, tmp_path)
    folder = RunFolder(tmp_path / spec.run_id)
    wait_for(folder.newest_checkpoint, "the first checkpoint")
    os.kill(read_note(folder, "two").pid, signal.SIGTERM)
    wait_for(lambda: read_note(folder, "two").exit_code is not None, "the node's end")
    assert read_note(folder, "two").exit_code == STOPPED
    run = driver.wait()
    if isinstance(run, Exception):
        raise run
    assert [record.step for record in folder.read_steps()] == list(range(1, 301))
    assert folder.read_attempts()[-1]["placement"]["layout"]["dp"] == 1


@pytest.mark.slow
def test_a_driver_that_comes_back_follows_nodes_that_were_started_by_hand(corpus, tmp_path, capfd):
    """A stop leaves them alone, and a second driver neither starts nor asks for them again."""
    spec = spec_of(corpus, num_steps=300, start="print")
    folder = RunFolder(tmp_path / spec.run_id)
    lines = [
        node_command(
            spec.placement.launch, run=folder.path, logs=folder.logs / "attempt-000", number=number
        )
        for number in range(2)
    ]
    nodes = []

    def start_and_interrupt():
        wait_for(lambda: folder.read_launched() is not None, "the driver")
        nodes.extend(psutil.Popen(["sh", "-c", line]) for line in lines)
        wait_for(folder.newest_checkpoint, "the first checkpoint")
        os.kill(os.getpid(), signal.SIGINT)

    person = threading.Thread(target=start_and_interrupt)
    person.start()
    with pytest.raises(RunError, match=r"no longer followed .* goes on"):
        launch(spec, corpus.sample_costs, corpus.shards, str(tmp_path))
    person.join()
    printed = capfd.readouterr().out
    assert all(line in printed.replace("\n", " ").replace("  ", " ") for line in lines)
    assert folder.read_run() is None
    run = launch(spec, corpus.sample_costs, corpus.shards, str(tmp_path))
    assert [node.wait(30) for node in nodes] == [0, 0]
    assert run.num_attempts == 1
    assert "follows nodes job attempt-000" in capfd.readouterr().out


def test_a_meeting_point_that_is_taken_is_named(corpus, tmp_path):
    spec = spec_of(corpus)
    port = spec.placement.launch.nodes.port
    with (
        socket.create_server(("", port)),
        pytest.raises(RunError, match=f"Port {port} of node one, where nodes meet, cannot be had"),
    ):
        launch(spec, corpus.sample_costs, corpus.shards, str(tmp_path))
    assert RunFolder(tmp_path / spec.run_id).read_status()["state"] == "failed"


def test_a_node_that_does_not_take_part_is_quoted(corpus, tmp_path):
    """The second node looks for the first at another port."""
    other = free_port()
    port = free_port()
    astray = SSH.replace("sys.argv[2]", f"sys.argv[2].replace(':{port}', ':{other}', num)")
    astray = astray.replace("import ", "num = 'two' in __import__('sys').argv; import ", 1)
    spec = spec_of(corpus, port=port, ssh=f'{sys.executable} -c "{astray}"')
    started_by = spec.placement.launch.model_copy(update={"start_timeout_s": 4.0})
    placement = spec.placement.model_copy(update={"launch": started_by})
    with pytest.raises(RunError) as error:
        launch(
            spec.model_copy(update={"placement": placement}),
            corpus.sample_costs,
            corpus.shards,
            str(tmp_path),
        )
    said = f"Node two could not reach the meeting point 127.0.0.1:{other}"
    assert said in str(error.value)


def test_hosts_that_cannot_be_reached_are_named(corpus, tmp_path):
    spec = spec_of(corpus, ssh="false")
    with pytest.raises(RunError, match=r"one(, two)? could not be started"):
        launch(spec, corpus.sample_costs, corpus.shards, str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hosts": ()}, "nodes.hosts names none"),
        ({"hosts": ("one",)}, "names 1, and the run is for 2 nodes"),
        ({"hosts": ("one", "one")}, "names a host twice"),
        ({"hosts": ("one", "")}, "names '', which is no host"),
        ({"hosts": ("-oProxyCommand=x", "two")}, "names '-oProxyCommand=x', which is no host"),
    ],
)
def test_hosts_that_do_not_fit_start_nothing(corpus, tmp_path, settings, message):
    spec = spec_of(corpus, **settings)
    with pytest.raises(LayoutError, match=message):
        launch(spec, corpus.sample_costs, corpus.shards, str(tmp_path))


def test_nodes_that_do_not_come_are_counted(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "_OWN_WORDS_S", 0.0)
    spec = spec_of(corpus, start="print")
    spread = spec.placement.launch.model_copy(update={"start_timeout_s": 1.0})
    placement = spec.placement.model_copy(update={"launch": spread})
    with pytest.raises(RunError, match=r"0 of 2 nodes came within 1 s: none"):
        launch(
            spec.model_copy(update={"placement": placement}),
            corpus.sample_costs,
            corpus.shards,
            str(tmp_path),
        )


@pytest.fixture
def folder(corpus, tmp_path):
    spec = spec_of(corpus)
    spread = spec.placement.launch.model_copy(update={"start_timeout_s": 1.0})
    placement = spec.placement.model_copy(update={"launch": spread})
    folder = RunFolder(tmp_path)
    folder.write_spec(spec.model_copy(update={"placement": placement}))
    return folder


def run_node(folder, *, number, port=1):
    logs = folder.logs / "attempt-000"
    meet = f"127.0.0.1:{port}"
    arguments = [str(folder.path), str(logs), "--meet", meet, "--node", str(number)]
    return node.main([*arguments, "--name", f"n{number}"])


def test_a_node_without_the_first_says_what_it_waited_for(folder, capsys):
    assert run_node(folder, number=1) == 1
    assert "The first node has not joined attempt-000" in capsys.readouterr().err


def note_of(folder, **changes):
    own = meeting.Own(name="n0", number=0, meet="127.0.0.1:1", logs=folder.logs / "attempt-000")
    note = meeting.join(folder, spec=folder.read_spec(), own=own, seen=None)
    note = note.model_copy(update=changes)
    folder.write_node(note)
    return note


def test_a_meeting_point_that_cannot_be_reached_is_named(folder, capsys):
    note_of(folder)
    port = free_port()
    assert run_node(folder, number=1, port=port) == 1
    said = capsys.readouterr().err
    assert f"could not reach the meeting point 127.0.0.1:{port} within 1 s" in said
    assert "firewall" in said


def test_a_folder_that_a_node_does_not_see_is_said(tmp_path, capsys):
    assert run_node(RunFolder(tmp_path / "elsewhere"), number=0) == 1
    assert "is no run's folder on node n0" in capsys.readouterr().err


def test_a_node_with_other_packages_is_refused(folder):
    first = note_of(folder)
    versions = {**first.provenance.versions, "torch": "2.11.0"}
    other = first.model_copy(
        update={
            "name": "n1",
            "provenance": first.provenance.model_copy(update={"versions": versions}),
        }
    )
    there = first.provenance.versions["torch"]
    with pytest.raises(RunError, match=f"torch is 2.11.0 on n1 and {there} on n0"):
        meeting.check_alike(other, first=first)
    changed = first.provenance.model_copy(update={"source_sha256": "other"})
    with pytest.raises(RunError, match="The code on n0 is other than on n0"):
        meeting.check_alike(first.model_copy(update={"provenance": changed}), first=first)
    # Another commit with the same training sources computes the same.
    commit = first.provenance.model_copy(update={"git_commit": "other"})
    meeting.check_alike(first.model_copy(update={"provenance": commit}), first=first)


@pytest.mark.parametrize(
    ("ahead_s", "words"),
    [(34.0, "n1 is 34 s ahead of that of n0"), (-20.0, "n0 is 20 s ahead of that of n1")],
)
def test_a_node_whose_clock_is_off_is_refused(folder, ahead_s, words):
    first = note_of(folder, clock_ahead_s=0.1)
    off = first.model_copy(update={"name": "n1", "clock_ahead_s": 0.1 + ahead_s})
    with pytest.raises(RunError, match=words):
        meeting.check_alike(off, first=first)
    meeting.check_alike(first.model_copy(update={"clock_ahead_s": 9.0}), first=first)


def test_a_late_node_of_an_earlier_launch_meets_nobody(folder):
    note_of(folder, launch="attempt-007")
    assert run_node(folder, number=1) == 1


def test_what_is_lost_is_told_by_this_clock_alone(folder, monkeypatch):
    """A note whose time is an hour off, but moves, is a node that lives."""
    note = note_of(folder)
    path = folder.node_path(note.name)
    job = NodesJob(
        folder,
        launch=folder.read_spec().placement.launch,
        name="attempt-000",
        commands=(),
        clients={},
    )
    now = [1000.0]
    monkeypatch.setattr("diptych.launch.nodes.time.monotonic", lambda: now[0])
    for beat in range(5):
        os.utime(path, (beat, beat))
        now[0] += 50.0
        assert job.poll() is None
    now[0] += LOST_AFTER_S + 1
    assert job.poll() == 1
    assert "No sign of n0" in job.why()
    assert any("n0 is lost" in line for line in job.news())


def test_nodes_over_ssh_are_waited_for_before_others_start(folder, monkeypatch):
    note_of(folder)
    launched = Launched(
        kind="nodes", job_id="attempt-000", host="h", pid=1, started_s=0.0, logs="logs/attempt-000"
    )
    threading.Timer(1.0, lambda: note_of(folder, exit_code=STOPPED)).start()
    began = time.monotonic()
    assert attach(launched, folder=folder) is None
    assert time.monotonic() - began < LOST_AFTER_S
    assert read_note(folder, "n0").exit_code == STOPPED
