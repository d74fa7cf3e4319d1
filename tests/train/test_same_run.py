"""Promise 3: stopped or killed at any step and started again, it is the run that went through."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch

from diptych.core.errors import FormatError
from diptych.core.records import Layout, ZeroOptions
from diptych.monitor.run_folder import RunFolder
from diptych.parallel import storage
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec, train_rank

NUM_STEPS = 14  # 80 samples in batches of 8: the second epoch begins at step 10
SINGLE = Layout(micro_batch=4)
DDP = Layout(engine="ddp", dp=2, micro_batch=4)
FSDP = Layout(engine="fsdp2", shard=2, micro_batch=2)
ZERO_2 = Layout(engine="zero", shard=2, micro_batch=4, zero=ZeroOptions(stage=2))
ZERO_3 = Layout(engine="zero", shard=2, micro_batch=2, zero=ZeroOptions(stage=3))
# The scale begins where the tiny model's gradients overflow, and grows again after three steps.
_FP16 = {
    "precision": "fp16",
    "mixed_precision": {"loss_scale": {"initial": 2.0**24, "growth_interval": 3}},
}
DDP_FP16 = Layout.model_validate({**DDP.model_dump(), **_FP16})
ZERO_2_FP16 = Layout.model_validate({**ZERO_2.model_dump(), **_FP16})


def _start(tmp_path, corpus, layout, *, name="run", **settings):
    folder = RunFolder(tmp_path / name)
    folder.path.mkdir(exist_ok=True)
    settings = {"num_steps": NUM_STEPS, "checkpoint_every_steps": 3, **settings}
    spec = make_spec(corpus, layout=layout, model=TINY_MODEL, schedule=TINY_SCHEDULE, **settings)
    folder.write_spec(spec)
    return folder


def _weights(folder):
    return storage.read_weights(folder.checkpoints / f"step-{NUM_STEPS:08d}")


def _losses(folder):
    return [record.loss for record in folder.read_steps()]


def _scales(folder):
    return [(record.loss_scale, record.skipped) for record in folder.read_steps()]


@pytest.fixture(scope="module")
def through(corpus, tmp_path_factory):
    return {}


def _through(through, ranks, corpus, tmp_path_factory, layout):
    name = layout.model_dump_json()
    if name not in through:
        folder = _start(tmp_path_factory.mktemp("through"), corpus, layout)
        ranks(layout.world_size).run(train_rank, folder=folder.path)
        through[name] = folder
    return through[name]


@pytest.mark.parametrize(
    ("layout", "stop_at"),
    [
        pytest.param(SINGLE, 1, id="single at 1"),
        pytest.param(SINGLE, 10, id="single at 10"),
        pytest.param(DDP, 1, id="ddp at 1"),
        pytest.param(DDP, 10, id="ddp at 10"),
        pytest.param(FSDP, 1, id="fsdp2 at 1"),
        pytest.param(FSDP, 10, id="fsdp2 at 10"),
        pytest.param(ZERO_2, 10, id="zero 2 at 10"),
        pytest.param(ZERO_3, 10, id="zero 3 at 10"),
        # Both at the end of a row of skipped steps.
        pytest.param(DDP_FP16, 4, id="ddp in fp16 at 4"),
        pytest.param(ZERO_2_FP16, 4, id="zero 2 in fp16 at 4"),
    ],
)
def test_stopped_and_resumed_is_bitwise_the_same(
    layout, stop_at, through, ranks, corpus, tmp_path, tmp_path_factory
):
    whole = _through(through, ranks, corpus, tmp_path_factory, layout)
    folder = _start(tmp_path, corpus, layout)
    steps = ranks(layout.world_size).run(train_rank, folder=folder.path, stop_at=stop_at)
    assert set(steps) == {stop_at}
    ranks(layout.world_size).run(train_rank, folder=folder.path)
    assert [record.step for record in folder.read_steps()] == list(range(1, NUM_STEPS + 1))
    assert _losses(folder) == _losses(whole)
    assert _scales(folder) == _scales(whole)
    expected, found = _weights(whole), _weights(folder)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert folder.read_run().num_attempts == 2


@pytest.mark.parametrize("layout", [SINGLE, DDP, ZERO_3], ids=["single", "ddp", "zero 3"])
def test_killed_between_checkpoints_is_bitwise_the_same(
    layout, through, ranks, corpus, tmp_path, tmp_path_factory
):
    whole = _through(through, ranks, corpus, tmp_path_factory, layout)
    folder = _start(tmp_path, corpus, layout)
    with pytest.raises(AssertionError, match="a planned fault"):
        ranks(layout.world_size).run(train_rank, folder=folder.path, die_at=5)
    # A record is written one step late, but for a checkpoint; what was lost is done again.
    assert len(folder.read_steps()) == 4
    assert [path.name for path in storage.list_checkpoints(folder.checkpoints)] == ["step-00000003"]
    ranks(layout.world_size).run(train_rank, folder=folder.path)
    assert [record.step for record in folder.read_steps()] == list(range(1, NUM_STEPS + 1))
    assert _losses(folder) == _losses(whole)
    expected, found = _weights(whole), _weights(folder)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([DDP, SINGLE], id="ddp, one process"),
        pytest.param([ZERO_2, FSDP, DDP, ZERO_3, SINGLE], id="every engine after another"),
    ],
)
def test_resumed_on_other_layouts_follows(
    layouts, through, ranks, corpus, tmp_path, tmp_path_factory
):
    whole = _through(through, ranks, corpus, tmp_path_factory, SINGLE)
    stops = [3, 6, 8, 11][: len(layouts) - 1]
    for layout, stop_at in zip(layouts, [*stops, None], strict=True):
        folder = _start(tmp_path, corpus, layout)
        ranks(layout.world_size).run(train_rank, folder=folder.path, stop_at=stop_at)
    assert folder.read_run().num_attempts == len(layouts)
    assert [record.step for record in folder.read_steps()] == list(range(1, NUM_STEPS + 1))
    np.testing.assert_allclose(_losses(folder), _losses(whole), rtol=1e-4)
    expected, found = _weights(whole), _weights(folder)
    assert expected.keys() == found.keys()


@pytest.mark.parametrize(
    ("before", "after"),
    [(DDP_FP16, ZERO_2_FP16), (ZERO_2_FP16, DDP_FP16)],
    ids=["ddp to zero 2", "zero 2 to ddp"],
)
def test_another_engine_goes_on_with_the_loss_scale(before, after, ranks, corpus, tmp_path):
    folder = _start(tmp_path, corpus, before, num_steps=10)
    ranks(before.world_size).run(train_rank, folder=folder.path, stop_at=5)
    _start(tmp_path, corpus, after, num_steps=10)
    ranks(after.world_size).run(train_rank, folder=folder.path)
    scales = _scales(folder)
    assert any(skipped for _, skipped in scales[:5])
    for (scale, skipped), (following, _) in pairwise(scales):
        # Halved after a skipped step, kept or doubled after others.
        assert following / scale in ((0.5,) if skipped else (1.0, 2.0))
    assert folder.read_run().num_skipped == sum(skipped for _, skipped in scales)


def test_a_damaged_checkpoint_is_passed_over(ranks, corpus, tmp_path, through, tmp_path_factory):
    whole = _through(through, ranks, corpus, tmp_path_factory, SINGLE)
    folder = _start(tmp_path, corpus, SINGLE)
    ranks(1).run(train_rank, folder=folder.path, stop_at=6)
    newest = storage.list_checkpoints(folder.checkpoints)[-1]
    tensors = next(newest.glob("*.safetensors"))
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    with pytest.raises(FormatError, match="is damaged"):
        storage.verify(newest)
    ranks(1).run(train_rank, folder=folder.path)
    attempts = [json.loads(line) for line in folder.attempts.read_text().splitlines()]
    assert [attempt["from_step"] for attempt in attempts] == [0, 3]
    assert {attempt["attention"]["kernel"] for attempt in attempts} == {"sdpa"}
    assert _losses(folder) == _losses(whole)


def test_a_checkpoint_that_was_cut_off_is_not_there(ranks, corpus, tmp_path):
    folder = _start(tmp_path, corpus, SINGLE)
    ranks(1).run(train_rank, folder=folder.path, stop_at=3)
    whole = storage.list_checkpoints(folder.checkpoints)[-1]
    whole.rename(whole.with_name(f".{whole.name}.partial"))
    assert storage.list_checkpoints(folder.checkpoints) == []


def test_another_runs_checkpoint_is_refused(ranks, corpus, tmp_path):
    folder = _start(tmp_path, corpus, SINGLE)
    ranks(1).run(train_rank, folder=folder.path, stop_at=3)
    _start(tmp_path, corpus, SINGLE, lr=5e-4)
    with pytest.raises(AssertionError, match="belongs to another run"):
        ranks(1).run(train_rank, folder=folder.path)


def test_only_the_newest_checkpoints_are_kept(ranks, corpus, tmp_path):
    folder = _start(tmp_path, corpus, SINGLE, checkpoint_every_steps=1, num_steps=4)
    spec = folder.read_spec()
    placement = spec.placement.model_copy(update={"keep_checkpoints": 2})
    folder.write_spec(spec.model_copy(update={"placement": placement}))
    ranks(1).run(train_rank, folder=folder.path)
    names = [path.name for path in storage.list_checkpoints(folder.checkpoints)]
    assert names == ["step-00000003", "step-00000004"]
