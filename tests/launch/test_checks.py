"""What the driver says of a run before any rank starts."""

from __future__ import annotations

import shutil
from collections import namedtuple

import numpy as np
import pytest

from diptych.core.errors import LayoutError
from diptych.core.records import Layout, ModelSpec, Preflight, ScheduleSpec
from diptych.data.schedule.assign import assign
from diptych.data.schedule.ragged import pack_rows
from diptych.launch import checks as looking
from diptych.launch.checks import (
    check_batch,
    check_folders,
    check_manifest,
    check_room,
    check_run,
    checkpoint_bytes,
    num_checkpoints,
    refuse_failed,
)
from diptych.launch.corpus import Depth
from diptych.monitor.run_folder import RunFolder
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec, train_rank

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def spec(corpus):
    return make_spec(corpus, layout=Layout(), model=TINY_MODEL, schedule=TINY_SCHEDULE)


@pytest.fixture
def folder(tmp_path, spec):
    return RunFolder(tmp_path / "runs" / spec.run_id)


def _placed(spec, **fields):
    return spec.model_copy(update={"placement": spec.placement.model_copy(update=fields)})


def test_a_sound_run_passes_and_leaves_what_was_found(spec, folder):
    found = check_run(spec, folder=folder, depth=Depth())
    assert [check for check in found.checks if check.status == "fail"] == []
    refuse_failed(found)
    kept = Preflight.model_validate_json((folder.path / "preflight.json").read_text())
    assert kept == found
    names = [check.name for check in found.checks]
    assert names == [
        *("launcher", "machine", "folders", "disk", "manifest", "shards", "held-out"),
        *("batch", "versions", "git", "tracker", "network"),
    ]


def test_what_fails_is_refused_with_its_cure(spec, folder, tmp_path):
    found = check_run(_placed(spec, shards=str(tmp_path)), folder=folder, depth=Depth())
    with pytest.raises(LayoutError) as refused:
        refuse_failed(found)
    told = str(refused.value)
    assert told.startswith(f"Run {spec.run_id} would fail:\n  - shards: ")
    assert "\n    Make the shards again: kedro run --pipelines=prepare" in told
    assert told.endswith("kedro check looks at all of it, without training")


def test_a_layout_that_this_machine_lacks_something_for_fails(spec, folder, monkeypatch):
    def refuse(*_, **__):
        raise LayoutError("needs x", cure="Install x")

    monkeypatch.setattr(looking, "check_machine", refuse)
    (check,) = check_run(spec, folder=folder, depth=Depth()).failed
    assert (check.name, check.found, check.cure) == ("machine", "needs x", "Install x")


def test_folders_that_are_missing_or_closed_are_named(spec, folder, tmp_path, monkeypatch):
    assert check_folders(spec, folder=folder).status == "pass"
    check = check_folders(_placed(spec, processor=str(tmp_path / "absent")), folder=folder)
    assert check.status == "fail"
    assert check.found.startswith(f"{tmp_path / 'absent'} not found from ")
    remote = _placed(spec, shards="s3://bucket/shards", image_cache=str(tmp_path / "cache"))
    assert check_folders(remote, folder=folder).status == "pass"
    # Root may write anywhere, so the answer is made up.
    monkeypatch.setattr(looking.os, "access", lambda path, mode: path != tmp_path)
    check = check_folders(remote, folder=RunFolder(tmp_path / "b" / "c"))
    assert check.found == f"{tmp_path / 'b' / 'c'}, {tmp_path / 'cache'} cannot be written to"


@pytest.mark.parametrize(
    ("free", "status"),
    [(999, "fail"), (1000, "warn"), (3999, "warn"), (4000, "pass")],
)
def test_the_disk_must_have_room(spec, folder, monkeypatch, free, status):
    monkeypatch.setattr(looking, "checkpoint_bytes", lambda *_, **__: 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10_000, 0, free))
    # Steps 2, 4 and 6 are saved: three, and one that is being written.
    assert check_room(spec, folder=folder).status == status


def test_what_lies_there_already_needs_no_room(spec, folder, monkeypatch):
    checkpoint = folder.checkpoints / "step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checksums.json").write_bytes(b"x" * 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10_000, 0, 3000))
    assert checkpoint_bytes(spec, folder=folder) == 1000
    assert check_room(spec, folder=folder).status == "pass"


@pytest.mark.parametrize(
    ("fields", "num"),
    [
        ({"keep_checkpoints": 2, "checkpoint_every_steps": 1}, 3),
        ({"keep_checkpoints": 2, "checkpoint_every_steps": 1, "keep_best": "loss"}, 4),
        ({"keep_checkpoints": 1, "checkpoint_every_steps": 1, "keep_every_steps": 3}, 4),
        ({"keep_checkpoints": 9, "checkpoint_every_steps": 6}, 2),
    ],
)
def test_checkpoints_on_the_disk_are_counted(spec, fields, num):
    assert num_checkpoints(_placed(spec, **fields)) == num


def test_where_the_plan_has_counted_no_model_is_inspected(spec, folder, monkeypatch):
    monkeypatch.setattr(looking, "inspect", None)
    assert checkpoint_bytes(_placed(spec, checkpoint_bytes=4321), folder=folder) == 4321


def test_a_checkpoint_s_size_is_what_one_takes(spec, folder, ranks):
    """Against a checkpoint that training wrote."""
    said = checkpoint_bytes(spec, folder=folder)
    folder.path.mkdir(parents=True)
    folder.write_spec(spec)
    ranks(1).run(train_rank, folder=folder.path, stop_at=2)
    (written,) = folder.checkpoints.glob("step-*/shard-*.safetensors")
    # A safetensors file has a header beside the tensors.
    assert said <= written.stat().st_size <= 1.1 * said
    assert checkpoint_bytes(spec, folder=folder) >= written.stat().st_size


def test_another_manifest_than_the_run_s_fails(corpus, spec):
    assert check_manifest(corpus.manifest, spec=spec).status == "pass"
    other = corpus.manifest.model_copy(update={"quarantined": {"a": {"b": 3}}})
    assert check_manifest(other, spec=spec).status == "fail"


def test_a_manifest_that_is_missing_fails(spec, folder, tmp_path):
    found = check_run(
        _placed(spec, manifest=str(tmp_path / "no.json")), folder=folder, depth=Depth()
    )
    assert [check.name for check in found.failed] == ["manifest"]


@pytest.mark.parametrize(
    ("schedule", "layout", "status", "said"),
    [
        ((32, 8), (2, 8), "pass", "32 rows = 2 ranks x 8 rows x 2 micro-batches"),
        ((32, 8), (2, 16), "pass", "32 rows = 2 ranks x 16 rows x 1 micro-batches"),
        # Four units of 8 rows on 3 ranks: two rounds, two of six places are empty.
        ((32, 8), (3, 8), "warn", "x 2 micro-batches - 16 of filler (33% idle; up to 2 ranks)"),
        ((40, 4), (3, 4), "warn", "x 4 micro-batches - 8 of filler (17% idle; up to 2 ranks)"),
        ((92, 4), (3, 4), "pass", "x 8 micro-batches - 4 of filler (4% idle; up to 1 ranks)"),
    ],
)
def test_a_batch_is_counted_out(spec, schedule, layout, status, said):
    global_batch, group = schedule
    spec = _placed(spec, layout=Layout(dp=layout[0], micro_batch=layout[1]))
    identity = spec.identity.model_copy(
        update={"schedule": ScheduleSpec(global_batch=global_batch, group=group)}
    )
    check = check_batch(spec.model_copy(update={"identity": identity}))
    assert check.status == status
    assert said in check.found


def test_filler_is_what_assign_makes():
    """The count above, against what the ranks are dealt."""
    rows = pack_rows([np.array([number]) for number in range(40)])
    dealt = [
        assign(rows, costs=np.ones(40), world_size=3, rank=rank, micro_batch=4, group=4)
        for rank in range(3)
    ]
    places = sum(len(micro) for mine in dealt for micro in mine)
    assert places - 40 == 8


def test_a_model_that_cannot_be_is_no_traceback(spec, folder):
    """The size of a checkpoint is asked of a model whose weights are not there."""
    identity = spec.identity.model_copy(update={"model": ModelSpec(weights="/nowhere", sizes={})})
    check = check_room(spec.model_copy(update={"identity": identity}), folder=folder)
    assert check.status == "skip"
    assert "nowhere" in check.found
