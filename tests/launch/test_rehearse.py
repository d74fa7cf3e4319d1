"""Ranks that are started only to look around, and what becomes of their answers."""

from __future__ import annotations

import json
import shutil

import pytest

from diptych.core.records import Check, LaunchSpec, Layout
from diptych.launch import rehearse as module
from diptych.launch.corpus import Depth
from diptych.launch.ranks import check_loading, measure_all_reduce, merge
from diptych.launch.ready import alone
from diptych.launch.rehearse import check_on_ranks, judge_link, rehearse
from diptych.monitor.run_folder import RunFolder
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec


@pytest.fixture
def spec(corpus):
    layout = Layout(dp=2, micro_batch=4)
    return make_spec(corpus, layout=layout, model=TINY_MODEL, schedule=TINY_SCHEDULE)


@pytest.fixture
def folder(tmp_path, spec):
    return RunFolder(tmp_path / spec.run_id)


@pytest.fixture
def no_ranks(monkeypatch):
    monkeypatch.setattr(module.local, "start", lambda *_, **__: pytest.fail("ranks were started"))


def _check(status, found="x"):
    return Check(name="memory", status=status, found=found, cure="c")


def test_of_many_ranks_the_worst_is_told_with_who_says_it():
    of_all = [[_check("pass", "9 GiB")], [_check("warn", "1 GiB")], [_check("pass", "9 GiB")]]
    (told,) = merge(of_all, nodes=["a", "b", "b"])
    assert (told.status, told.found, told.where) == ("warn", "1 GiB", "ranks 1 on b")
    (told,) = merge([[_check("pass", "9 GiB")]] * 3, nodes=["a", "b", "b"])
    assert (told.status, told.found, told.where) == ("pass", "9 GiB", "all ranks")
    (told,) = merge([[_check("pass", "9")], [_check("pass", "8")]], nodes=["a", "b"])
    assert told.found == "9 (rank 0; others differ a little)"


@pytest.mark.parametrize(
    ("measured", "expected", "status"),
    [(None, 1e9, "skip"), (4e8, 1e9, "warn"), (6e8, 1e9, "pass"), (6e8, None, "pass")],
)
def test_an_all_reduce_is_held_against_the_link(measured, expected, status):
    assert judge_link(measured, expected=expected).status == status


def test_other_launchers_leave_it_to_training(spec, folder, no_ranks):
    launch = {"launch": LaunchSpec(kind="slurm")}
    spec = spec.model_copy(update={"placement": spec.placement.model_copy(update=launch)})
    (check,) = check_on_ranks(spec, folder=folder, link_bytes_per_s=None)
    assert check.status == "skip"
    assert "with slurm they compare" in check.found


def test_what_is_being_trained_is_not_disturbed(spec, folder, no_ranks):
    with alone(folder):
        (check,) = check_on_ranks(spec, folder=folder, link_bytes_per_s=None)
    assert check.status == "warn"
    assert "is being trained by another process" in check.found


def test_ranks_are_not_started_for_what_fails_already(spec, folder, no_ranks, tmp_path):
    placement = spec.placement.model_copy(update={"shards": str(tmp_path)})
    found = rehearse(
        spec.model_copy(update={"placement": placement}),
        folder=folder,
        depth=Depth(),
        with_ranks=True,
    )
    assert found.checks[-1].status == "skip"
    assert [check.name for check in found.failed] == ["shards"]
    kept = json.loads((folder.path / "preflight.json").read_text())
    assert len(kept["checks"]) == len(found.checks)


def test_a_schedule_that_cannot_be_is_a_check(spec, folder, no_ranks):
    layout = spec.placement.layout.model_copy(update={"micro_batch": 3})
    placement = spec.placement.model_copy(update={"layout": layout})
    found = rehearse(
        spec.model_copy(update={"placement": placement}),
        folder=folder,
        depth=Depth(),
        with_ranks=False,
    )
    (failed,) = found.failed
    assert failed.name == "schedule"
    assert "3 rows splits groups of 4" in failed.found


def look_on_rank(spec, folder):
    import torch
    import torch.distributed as dist

    from diptych.parallel.mesh import World

    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    return check_loading(spec, world=world, for_s=0.01).model_dump(), measure_all_reduce(world)


def test_loading_and_an_all_reduce_are_measured(ranks, spec, folder):
    (first, rate), (_, other) = ranks(2).run(look_on_rank, spec=spec, folder=folder.path)
    assert first["status"] == "pass"
    assert "samples/s of a rank" in first["found"]
    assert rate == other > 0


def test_shards_that_a_rank_cannot_read_fail(ranks, spec, folder, corpus, tmp_path):
    shards = tmp_path / "shards"
    shutil.copytree(corpus.shards, shards)
    for path in shards.rglob("*.tar"):
        path.write_bytes(b"")
    placement = spec.placement.model_copy(update={"shards": str(shards)})
    spec = spec.model_copy(update={"placement": placement})
    for found, _ in ranks(2).run(look_on_rank, spec=spec, folder=folder.path):
        assert found["status"] in ("fail", "warn")


@pytest.mark.slow
def test_real_ranks_look_around(spec, folder):
    found = rehearse(spec, folder=folder, depth=Depth(), with_ranks=True)
    by_name = {check.name: check for check in found.checks}
    assert not found.failed
    for name in ("alone", "code", "packages", "clocks", "folder", "loading", "all-reduce"):
        assert by_name[name].status == "pass", by_name[name]
    assert not folder.steps.exists()
    assert not (folder.path / "run_spec.json").exists()
    assert not (folder.path / "status.json").exists()


@pytest.mark.slow
def test_real_ranks_that_fail_are_quoted(spec, folder, monkeypatch):
    monkeypatch.setattr(
        module.local, "rank_environment", lambda spec, logs: {"OMP_NUM_THREADS": "none"}
    )
    placement = spec.placement.model_copy(update={"threads_per_rank": 0})
    (check,) = check_on_ranks(
        spec.model_copy(update={"placement": placement}), folder=folder, link_bytes_per_s=None
    )
    assert check.status == "fail"
    assert "ended with exit code 1" in check.found
    assert "RuntimeError" in check.found
