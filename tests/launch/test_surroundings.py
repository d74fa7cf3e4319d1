"""Scheduler, versions, git, tracker and network, each as found and as missing."""

from __future__ import annotations

import importlib.util
import shutil
from importlib import metadata

import pytest

from diptych.core.records import LaunchSpec, Layout, Provenance
from diptych.launch import surroundings
from diptych.launch.checks import check_launcher
from diptych.launch.surroundings import (
    check_git,
    check_network,
    check_tracker,
    check_versions,
)
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec


@pytest.fixture
def launched(corpus):
    def make(**launch):
        spec = make_spec(corpus, layout=Layout(), model=TINY_MODEL, schedule=TINY_SCHEDULE)
        placed = {"launch": LaunchSpec.model_validate(launch)}
        return spec.model_copy(update={"placement": spec.placement.model_copy(update=placed)})

    return make


def test_this_machine_needs_no_scheduler(launched):
    check = check_launcher(launched())
    assert (check.status, check.found) == ("pass", "local: 1 ranks on this machine")


def test_slurm_s_commands_are_looked_for(launched, monkeypatch):
    spec = launched(kind="slurm")
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "squeue" else f"/bin/{name}")
    check = check_launcher(spec)
    assert check.status == "fail"
    assert "squeue cannot be found" in check.found


def test_ray_s_package_is_looked_for(launched, monkeypatch):
    spec = launched(kind="ray")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert check_launcher(spec).status == "fail"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert check_launcher(spec).status == "pass"


def test_as_many_hosts_as_nodes_are_named(launched):
    spec = launched(kind="nodes", num_nodes=3, nodes={"hosts": ("a", "b")})
    check = check_launcher(spec)
    assert (check.status, check.found) == (
        "fail",
        "train.launch.nodes.hosts names 2, and the run is for 3 nodes",
    )
    spec = launched(kind="nodes", num_nodes=2, nodes={"hosts": ("a", "b")})
    assert check_launcher(spec).found == "nodes: a, b"


@pytest.mark.parametrize(
    ("commit", "dirty", "status"),
    [(None, None, "warn"), ("a" * 40, True, "warn"), ("a" * 40, False, "pass")],
)
def test_code_that_cannot_be_found_again_is_said(commit, dirty, status):
    found = Provenance(git_commit=commit, git_dirty=dirty, source_sha256="x", versions={})
    assert check_git(found).status == status


def test_versions_are_held_against_the_constraints(tmp_path):
    constraints = tmp_path / "constraints.txt"
    numpy, torch = metadata.version("numpy"), metadata.version("torch").split("+")[0]
    constraints.write_text(f"# made for\nnumpy=={numpy}\ntorch=={torch}+cpu\n")
    assert check_versions(constraints).status == "pass"
    constraints.write_text("numpy==1.0\n")
    check = check_versions(constraints)
    assert check.status == "warn"
    assert check.found == f"other than the tests ran with: numpy {numpy} instead of 1.0"
    assert check_versions(tmp_path / "absent").status == "pass"


def test_a_version_with_a_known_hole_fails(monkeypatch):
    from diptych.core.floors import check_floors

    monkeypatch.setattr(surroundings, "check_floors", lambda: check_floors(lambda name: "0.1"))
    check = check_versions()
    assert check.status == "fail"
    assert "torch 0.1 is older than" in check.found
    assert check.cure.startswith("Upgrade: pip install")


SECRET = "a1b2c3d4e5f6"


@pytest.mark.parametrize(
    ("environment", "status", "said"),
    [
        ({"WANDB_API_KEY": SECRET}, "pass", "with a key of the environment"),
        ({"WANDB_MODE": "offline"}, "pass", "offline"),
        ({"NETRC": "{tmp}/netrc"}, "pass", "with a key of netrc"),
        ({"NETRC": "{tmp}/absent"}, "fail", "has no key"),
    ],
)
def test_a_tracker_s_login_is_said_and_its_key_is_not(
    tmp_path, monkeypatch, environment, status, said
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login u password {SECRET}\n")
    given = {"NETRC": str(tmp_path / "absent")}
    given |= {name: value.format(tmp=tmp_path) for name, value in environment.items()}
    check = check_tracker("wandb", environment=given)
    assert check.status == status
    assert said in check.found
    assert SECRET not in check.model_dump_json()


def test_a_tracker_that_is_not_used_or_not_installed(monkeypatch):
    assert check_tracker(None).status == "skip"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert check_tracker("wandb").cure == "pip install wandb"


def test_only_variables_of_our_settings_are_shown_with_values(launched, tmp_path):
    spec = launched(network={"interface": "eth7", "variables": {"NCCL_NTHREADS": "64"}})
    environment = {"NCCL_TOPO_FILE": "hidden-1", "WANDB_API_KEY": "hidden-2", "UCX_TLS": "hidden-3"}
    check = check_network(spec, logs=tmp_path, environment=environment)
    assert "NCCL_SOCKET_IFNAME=eth7" in check.found
    assert "NCCL_NTHREADS=64" in check.found
    assert check.found.endswith("; also set in the environment: NCCL_TOPO_FILE, UCX_TLS")
    assert "hidden" not in check.found
    assert "WANDB" not in check.found
