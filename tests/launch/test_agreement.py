"""Ranks that differ in what they must have alike, and two sets of ranks on one run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diptych.core.errors import RunError
from diptych.launch.agreement import RunLock
from diptych.launch.alike import compare_clocks, compare_versions

HOLD = """
import sys, time
from pathlib import Path
from diptych.launch.agreement import RunLock
lock = RunLock(Path(sys.argv[1]))
print(lock.take(token="theirs", within_s=0), flush=True)
time.sleep(120)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds a run's lock."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "ranks.lock")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "None\n"
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def agree_on_rank(folder: Path, *, faults: dict[str, object], timeout_s: float = 60.0):
    """Agree on this rank; the second one has a fault. Returns the checks, or what was raised."""
    import torch
    import torch.distributed as dist

    from diptych.core import provenance
    from diptych.launch import agreement
    from diptych.parallel.mesh import World

    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    mine = faults if world.rank == 1 else {}
    os.environ["DIPTYCH_NODE"] = f"node-{world.rank}"
    hash_sources, read_versions = provenance.hash_sources, provenance.read_versions
    agreement._TOKEN_WAIT_S = 0.1
    try:
        if "code" in mine:
            provenance.hash_sources = lambda: mine["code"]
        if "versions" in mine:
            provenance.read_versions = lambda names: {**read_versions(names), **mine["versions"]}
        found = agreement.agree(
            mine.get("elsewhere", folder),
            world=world,
            timeout_s=timeout_s,
            clock=lambda: time.time() + mine.get("clock_s", 0.0),
        )
        checks = {check.name: (check.status, check.found, check.cure) for check in found.checks}
        try:
            found.refuse_failed()
        except RunError as error:
            return checks, str(error)
        finally:
            found.lock.release()
        return checks, None
    finally:
        provenance.hash_sources, provenance.read_versions = hash_sources, read_versions
        del os.environ["DIPTYCH_NODE"]


def _agree(ranks, folder, **faults):
    results = ranks(2).run(agree_on_rank, folder=folder, faults=faults)
    assert results[0] == results[1], "every rank comes to the same answer"
    return results[0]


def test_ranks_that_are_alike_agree(ranks, tmp_path):
    checks, refused = _agree(ranks, tmp_path)
    assert refused is None
    assert {name: status for name, (status, _, _) in checks.items()} == dict.fromkeys(
        ["alone", "code", "packages", "clocks", "folder"], "pass"
    )
    assert checks["code"][1] == "the same on 2 nodes"


def test_other_code_on_a_node_is_refused(ranks, tmp_path):
    checks, refused = _agree(ranks, tmp_path, code="other")
    assert checks["code"][0] == "fail"
    assert refused.startswith("The code on node-1 is other than on node-0. Have all nodes")


def test_another_version_on_a_node_names_node_and_package(ranks, tmp_path):
    import torch

    checks, refused = _agree(ranks, tmp_path, versions={"torch": "1.0", "peft": "0.1"})
    assert checks["packages"][0] == "fail"
    assert f"torch is 1.0 on node-1 and {torch.__version__.split('+')[0]}" in refused
    assert "peft is 0.1 on node-1" in refused
    assert "Install the same versions on every node" in refused


@pytest.mark.parametrize(("off_s", "status"), [(3, "pass"), (7, "warn"), (-40, "fail")])
def test_clocks_that_differ(ranks, tmp_path, off_s, status):
    checks, refused = _agree(ranks, tmp_path, clock_s=off_s)
    assert checks["clocks"][0] == status
    assert (refused is not None) == (status == "fail")


def test_clocks_are_compared_to_the_millisecond_and_the_furthest_is_named():
    now_s = 1_796_073_829.0
    times = [now_s, now_s + 0.25, now_s + 7.5, now_s]
    check = compare_clocks(["a", "b", "c", "d"], times_s=times)
    assert (check.status, check.found) == (
        "warn",
        "The clock of c is 8 s ahead of that of a; furthest from the others' is that of c",
    )
    assert compare_clocks(["a", "b"], times_s=times[:2]).found == "within 0.2 s"


def test_another_folder_of_the_same_name_is_refused(ranks, tmp_path):
    own, other = tmp_path / "one" / "run", tmp_path / "two" / "run"
    own.mkdir(parents=True)
    other.mkdir(parents=True)
    checks, refused = _agree(ranks, own, elsewhere=other)
    assert checks["folder"][0] == "fail"
    assert refused.startswith(f"node-1 does not see what node-0 writes into {own}")


def test_two_sets_of_ranks_on_one_run_are_refused(ranks, tmp_path, holder):
    results = ranks(2).run(agree_on_rank, folder=tmp_path, faults={}, timeout_s=1.0)
    for checks, refused in results:
        assert checks["alone"][0] == "fail"
        assert f"Other ranks train this run in {tmp_path}: process {holder.pid} on " in refused
        assert f"kedro stop {tmp_path.name}" in refused


def test_a_killed_process_leaves_the_lock_to_the_next(tmp_path, holder):
    lock = RunLock(tmp_path / "ranks.lock")
    assert f"process {holder.pid}" in lock.take(token="mine", within_s=0)
    assert "theirs" in (tmp_path / "ranks.lock").read_text()
    holder.kill()
    assert lock.take(token="mine", within_s=20) is None
    lock.release()
    assert "mine" in (tmp_path / "ranks.lock").read_text()


def test_training_is_refused_while_others_train(corpus, tmp_path, holder, monkeypatch):
    import torch

    from diptych import worker
    from diptych.core.records import LaunchSpec, Layout, NetworkSpec
    from diptych.monitor.run_folder import RunFolder
    from diptych.parallel.mesh import World
    from tests.conftest import TINY_MODEL, TINY_SCHEDULE
    from tests.runs import make_spec

    spec = make_spec(corpus, layout=Layout(), model=TINY_MODEL, schedule=TINY_SCHEDULE)
    launch = LaunchSpec(network=NetworkSpec(timeout_s=1.0))
    placement = spec.placement.model_copy(update={"launch": launch})
    RunFolder(tmp_path).write_spec(spec.model_copy(update={"placement": placement}))
    alone = World(rank=0, size=1, device=torch.device("cpu"))
    monkeypatch.setattr(worker.mesh, "join", lambda layout, timeout_s: alone)
    monkeypatch.setattr(worker, "train_run", lambda *_, **__: pytest.fail("it trained"))
    with pytest.raises(RunError, match=f"Other ranks train this run.*process {holder.pid}"):
        worker.run_training(tmp_path)


def test_many_nodes_that_differ_are_cut_short():
    ranks = [{"node": f"n{rank}", "versions": {"torch": "2" if rank else "1"}} for rank in range(9)]
    found = compare_versions(ranks).found
    assert found == "torch is 2 on n1, n2, n3 and 5 more and 1 on n0"


def gather_on_rank(texts: list[str]) -> list[str]:
    import torch
    import torch.distributed as dist

    from diptych.parallel.mesh import World, gather_texts

    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    return gather_texts(texts[world.rank], world=world)


@pytest.mark.parametrize("texts", [["", "größer 猫"], ["x" * 100_000, ""], ["", ""]])
def test_texts_travel_whole(ranks, texts):
    assert ranks(2).run(gather_on_rank, texts=texts) == [texts, texts]
