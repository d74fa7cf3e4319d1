"""What of Ray needs no Ray: what is refused, what is asked for, and what is said of ends."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from diptych.core import ray as core_ray
from diptych.core.errors import ConfigError, RunError
from diptych.core.ray import check_ray, local_variables, ray_folder
from diptych.core.records import Layout
from diptych.launch import ray, ray_driver
from diptych.launch.job import launcher
from diptych.launch.notes import NoteTail, write_note
from diptych.launch.words import last_words
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    monkeypatch.setattr(core_ray.importlib.util, "find_spec", lambda name: object())


def _spec(corpus, *, size=2, **settings):
    layout = Layout(engine="ddp", dp=size, micro_batch=4)
    spec = make_spec(corpus, layout=layout, model=TINY_MODEL, schedule=TINY_SCHEDULE)
    launch = spec.placement.launch
    launch = launch.model_copy(update={"ray": launch.ray.model_copy(update=settings)})
    return spec.model_copy(
        update={"placement": spec.placement.model_copy(update={"launch": launch})}
    )


def test_ray_is_a_launcher():
    assert launcher("ray") is ray


def test_where_ray_is_not_installed_the_cure_is_said(monkeypatch):
    monkeypatch.setattr(core_ray.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"pip install 'diptych\[ray\]'"):
        check_ray(None)


@pytest.mark.parametrize("address", ["ray://head:10001", "http://head:8265", "head", "head:gcs"])
def test_addresses_of_another_kind_are_refused(address):
    with pytest.raises(RunError, match="is no address of a Ray cluster") as error:
        check_ray(address)
    assert "ray job submit" in error.value.cure


def test_an_address_where_nobody_listens_is_refused_at_once(monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(RunError, match=f"No Ray cluster answers at {address}"):
        check_ray(address)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(RunError, match=f"No Ray cluster answers at {address}"):
        check_ray("auto")
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_ray(f"127.0.0.1:{server.getsockname()[1]}")


def test_fewer_nodes_are_refused_for_now(corpus):
    spec = _spec(corpus)
    launch = spec.placement.launch.model_copy(update={"num_nodes": 2, "min_nodes": 1})
    placement = spec.placement.model_copy(update={"launch": launch})
    with pytest.raises(ConfigError, match="min_nodes is 1, and on Ray"):
        ray.check(spec.model_copy(update={"placement": placement}))


def test_a_local_cluster_s_sockets_have_short_paths(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 60)
    deep.mkdir()
    monkeypatch.setattr(core_ray.tempfile, "tempdir", str(deep))
    with ray_folder() as folder:
        # The longest that Ray makes: a date to the microsecond, a process's number, a name.
        name = "session_2026-11-30_21-11-38_671234_4194304/sockets/plasma_store"
        assert len(f"{folder}/{name}") <= 107
        assert folder.is_dir()
    assert not folder.exists()


def test_a_local_cluster_keeps_to_this_machine_and_user():
    variables = local_variables()
    assert variables == local_variables()
    assert len(variables["RAY_AUTH_TOKEN"]) == 64
    assert variables["RAY_AUTH_MODE"] == "token"
    assert variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert "RAY_AUTH_TOKEN" not in os.environ
    assert "RAY_AUTH_TOKEN" not in ray.environment(address="10.0.0.1:6379")
    for address in (None, "auto"):
        assert ray.environment(address=address)["RAY_USAGE_STATS_ENABLED"] == "0"


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, {"CPU": 1.0}),
        ({"cpus_per_rank": 4.0, "gpus_per_rank": 0.5}, {"CPU": 4.0, "GPU": 0.5}),
        ({"resources": {"nvme": 2.0}}, {"CPU": 1.0, "nvme": 2.0}),
    ],
)
def test_what_is_set_aside_for_a_rank(corpus, settings, asked):
    assert ray_driver.resources(_spec(corpus, **settings)) == asked


def test_a_cluster_that_is_too_small_is_refused_with_what_it_has(corpus):
    spec = _spec(corpus, size=4, cpus_per_rank=2.0, placement="SPREAD")
    ray_driver.check_room(spec, have={"a": {"CPU": 4.0}, "b": {"CPU": 4.0}})
    with pytest.raises(RunError) as error:
        ray_driver.check_room(spec, have={"a": {"CPU": 4.0, "memory": 1e9}, "b": {"CPU": 3.0}})
    assert error.value.found == (
        "Ray has no room for 4 ranks of 2 CPU each, placed SPREAD: a has 4 CPU; b has 3 CPU"
    )
    late = ray_driver.no_room(spec, have={"a": {"CPU": 8.0}}, free={"CPU": 1.0}, waited_s=30.0)
    assert "no room after 30 s for" in late.found
    assert late.found.endswith("a has 8 CPU; free of all is 1 CPU")


@pytest.mark.parametrize(
    ("code", "said"),
    [(-9, "Rank 3 was killed by SIGKILL first."), (1, "Rank 3 ended with exit code 1 first.")],
)
def test_a_summary_is_read_as_torch_elastic_s(tmp_path: Path, code, said):
    (tmp_path / "launcher.log").write_text("noise\n" + ray_driver.summary(3, code=code) + "\n")
    assert last_words(tmp_path) == said


def test_notes_are_read_once_and_whole(tmp_path):
    tail = NoteTail(tmp_path)
    assert tail.read() == []
    write_note(tmp_path, "news", "2 ranks\nare started")
    write_note(tmp_path, "why", "no room")
    assert tail.read() == [("news", "2 ranks\nare started"), ("why", "no room")]
    with (tmp_path / "notes.jsonl").open("a") as file:
        file.write('{"kind": "news", "te')
    assert tail.read() == []
    assert len(tail.read_all()) == 2
