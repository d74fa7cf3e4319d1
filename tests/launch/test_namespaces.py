"""Two network namespaces as hosts, a pair of virtual interfaces as the cable between them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from diptych.core.errors import RunError
from diptych.core.records import NetworkSpec
from diptych.launch.launch import launch
from diptych.monitor.run_folder import RunFolder
from tests.launch.test_nodes import Driver, losses, reference, spec_of, wait_for  # noqa: F401

# Has a shell in the host's namespace run the rest, as sshd on that host does.
SSH = (
    "import subprocess, sys; "
    "sys.exit(subprocess.call(['nsenter', '--net=/run/netns/' + sys.argv[1], "
    "'sh', '-c', sys.argv[2]]))"
)


@dataclass(frozen=True)
class Hosts:
    """The names of two namespaces, and their addresses."""

    names: tuple[str, str]
    addresses: tuple[str, str]

    def set_cable(self, state):
        _ip("-n", self.names[1], "link", "set", "eth0", state)


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts():
    pid = os.getpid()
    names = (f"diptych{pid}a", f"diptych{pid}b")
    addresses = ("10.233.77.1", "10.233.77.2")
    try:
        for name in names:
            _ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine makes no network namespaces: {error}")
    try:
        one, other = (f"eth0 netns {name}".split() for name in names)
        _ip("link", "add", *one, "type", "veth", "peer", *other)
        for name, address in zip(names, addresses, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield Hosts(names, addresses)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _spec(corpus, hosts, *, timeout_s=60.0, start_timeout_s=60.0, **settings):
    spec = spec_of(corpus, **settings)
    nodes = spec.placement.launch.nodes.model_copy(
        update={
            "hosts": hosts.names,
            "ssh": f'{sys.executable} -c "{SSH}"',
            "address": hosts.addresses[0],
        }
    )
    started_by = spec.placement.launch.model_copy(
        update={
            "nodes": nodes,
            "start_timeout_s": start_timeout_s,
            "network": NetworkSpec(timeout_s=timeout_s),
        }
    )
    placement = spec.placement.model_copy(update={"launch": started_by})
    return spec.model_copy(update={"placement": placement})


def test_two_hosts_train_as_one_machine_does(corpus, tmp_path, reference, hosts):  # noqa: F811
    spec = _spec(corpus, hosts)
    run = launch(spec, corpus.sample_costs, corpus.shards, str(tmp_path))
    folder = RunFolder(Path(run.folder))
    assert losses(folder) == reference
    notes = folder.read_nodes("attempt-000")
    assert [(note.name, note.address, note.exit_code) for note in notes] == [
        (hosts.names[0], hosts.addresses[0], 0),
        (hosts.names[1], hosts.addresses[1], 0),
    ]


def test_a_host_without_a_cable_is_named(corpus, tmp_path, hosts):
    hosts.set_cable("down")
    spec = _spec(corpus, hosts, start_timeout_s=6.0)
    with pytest.raises(RunError) as error:
        launch(spec, corpus.sample_costs, corpus.shards, str(tmp_path))
    said = f"Node {hosts.names[1]} could not reach the meeting point {hosts.addresses[0]}:"
    assert said in str(error.value)


@pytest.mark.slow
def test_a_cable_that_is_cut_leaves_the_run_to_the_first_host(corpus, tmp_path, hosts):
    spec = _spec(corpus, hosts, num_steps=400, min_nodes=1, timeout_s=15.0)
    placement = spec.placement.model_copy(update={"checkpoint_every_steps": 20})
    driver = Driver(spec.model_copy(update={"placement": placement}), corpus, tmp_path)
    folder = RunFolder(tmp_path / spec.run_id)
    wait_for(folder.newest_checkpoint, "the first checkpoint")
    hosts.set_cable("down")
    run = driver.wait()
    if isinstance(run, Exception):
        raise run
    attempts = folder.read_attempts()
    assert [attempt["placement"]["layout"]["dp"] for attempt in attempts] == [2, 1]
    assert [record.step for record in folder.read_steps()] == list(range(1, 401))
