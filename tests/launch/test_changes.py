"""What differs from the last attempt and from other runs is said, and nothing more."""

from __future__ import annotations

import json

import pytest

from diptych.core.records import Layout, Parent
from diptych.launch.changes import differences, tell_changes
from diptych.monitor.run_folder import RunFolder
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec, train_rank


def test_one_line_a_field():
    old = {"layout": {"engine": "ddp", "dp": 2}, "num_workers": 0, "same": [1], "gone": 3}
    new = {"layout": {"engine": "fsdp2", "dp": 2}, "num_workers": 4, "same": [1], "new": None}
    assert differences(old, new) == [
        "layout.engine: ddp -> fsdp2",
        "num_workers: 0 -> 4",
        "gone: 3 -> none",
    ]
    assert differences(new, new) == []


def test_what_an_older_release_did_not_write_is_no_change():
    assert differences({"a": 1}, {"a": 1, "b": {}, "c": [], "d": None}) == []


def test_long_values_are_cut_and_addresses_keep_their_secrets():
    (line,) = differences({"shards": "old"}, {"shards": "s3://me:s3cret@bucket/x?token=s3cret"})
    assert line == "shards: old -> s3://bucket/x?"
    (line,) = differences({"a": "b"}, {"a": "x" * 500})
    assert line == f"a: b -> {'x' * 57}..."


@pytest.fixture
def spec(corpus):
    return make_spec(corpus, layout=Layout(), model=TINY_MODEL, schedule=TINY_SCHEDULE)


def _other(corpus, **settings):
    return make_spec(corpus, layout=Layout(), model=TINY_MODEL, schedule=TINY_SCHEDULE, **settings)


def _left(root, spec, *, step=None):
    folder = RunFolder(root / spec.run_id)
    folder.write_spec(spec)
    if step is not None:
        checkpoint = folder.checkpoints / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "checksums.json").write_text("{}")
        state = {"loader": {"schedule_sha256": "a"}}
        (checkpoint / "state.json").write_text(json.dumps(state))
    return folder


def _tell(root, spec, *, schedule="a"):
    return tell_changes(spec, folder=RunFolder(root / spec.run_id), schedule_sha256=schedule)


def test_the_first_run_has_nothing_to_tell(tmp_path, spec):
    assert _tell(tmp_path, spec) == []


def test_another_identity_is_said_with_the_command_to_fork(tmp_path, spec, corpus):
    _left(tmp_path, spec, step=4)
    other = _other(corpus, lr=3e-4, num_steps=9)
    setting = f"train.fork_from={spec.run_id}@4"
    assert _tell(tmp_path, other) == [
        f"{other.run_id} is a new run; it differs from {spec.run_id}, the newest before it:",
        "  optimizer.lr: 0.001 -> 0.0003",
        "  num_steps: 6 -> 9",
        "to go on from that run's step 4 with these settings, stop this one and give the "
        f"same options and --params={setting}",
        f"  kedro run --pipelines=train --params={setting}",
    ]


def test_in_a_stage_the_command_names_it(tmp_path, spec, corpus):
    runs = tmp_path / "stages" / "align" / "runs"
    _left(runs, spec, step=4)
    lines = _tell(runs, _other(corpus, lr=3e-4))
    assert lines[-1].endswith(f" --params=stages.align.train.fork_from={spec.run_id}@4")


@pytest.mark.parametrize("step", [None, 6])
def test_where_there_is_nothing_to_go_on_from_no_fork_is_named(step, tmp_path, spec, corpus):
    """No checkpoint, or one that has all the steps that are asked for."""
    _left(tmp_path, spec, step=step)
    lines = _tell(tmp_path, _other(corpus, lr=3e-4))
    assert [line for line in lines if "fork_from" in line] == []
    assert "  optimizer.lr: 0.001 -> 0.0003" in lines


def test_a_fork_from_another_step_says_so(tmp_path, spec):
    def forked(step):
        parent = Parent(run_id="0" * 12, step=step, sha256="0")
        identity = spec.identity.model_copy(update={"parent": parent})
        return spec.model_copy(update={"identity": identity})

    _left(tmp_path, forked(3), step=5)
    assert _tell(tmp_path, forked(4))[1:] == ["  parent.step: 3 -> 4"]


@pytest.mark.parametrize(
    ("schedule", "said"), [("a", "the data go on"), ("b", "a new epoch begins")]
)
def test_a_fork_says_what_it_takes_over(schedule, said, tmp_path, spec):
    checkpoint = _left(tmp_path, spec, step=4).checkpoints / "step-00000004"
    parent = Parent(run_id=spec.run_id, step=4, sha256="0", keeps="weights")
    forked = spec.model_copy(
        update={
            "identity": spec.identity.model_copy(update={"parent": parent}),
            "placement": spec.placement.model_copy(update={"parent_checkpoint": str(checkpoint)}),
        }
    )
    lines = _tell(tmp_path, forked, schedule=schedule)
    assert lines[0] == f"begins from step 4 of run {spec.run_id}, with its weights alone"
    assert said in lines[1]
    assert len(lines) == 2


def test_the_difference_to_the_last_attempt_is_kept_and_shown(tmp_path, spec, ranks):
    folder = _left(tmp_path, spec)
    ranks(1).run(train_rank, folder=folder.path, stop_at=2)
    layout = spec.placement.layout.model_copy(update={"micro_batch": 4})
    placement = spec.placement.model_copy(update={"layout": layout, "keep_checkpoints": 3})
    moved = spec.model_copy(update={"placement": placement})
    lines = [
        f"layout.micro_batch: {spec.placement.layout.micro_batch} -> 4",
        "keep_checkpoints: 10 -> 3",
    ]
    shown = tell_changes(moved, folder=folder, schedule_sha256="a")
    assert shown == ["changed since the last attempt:", *(f"  {line}" for line in lines)]
    folder.write_spec(moved)
    ranks(1).run(train_rank, folder=folder.path)
    assert [attempt["changes"] for attempt in folder.read_attempts()] == [[], lines]
