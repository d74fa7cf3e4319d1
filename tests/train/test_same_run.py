"""Which checkpoint a run goes on from: the newest sound one of its own, on any layout.

That it goes on exactly is for `test_resume.py` and `tests/parallel/test_reshard.py` to say.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

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


def test_resumed_on_every_engine_after_another_follows(
    through, ranks, corpus, tmp_path, tmp_path_factory
):
    whole = _through(through, ranks, corpus, tmp_path_factory, SINGLE)
    layouts = [ZERO_2, FSDP, DDP, ZERO_3, SINGLE]
    for layout, stop_at in zip(layouts, [3, 6, 8, 11, None], strict=True):
        folder = _start(tmp_path, corpus, layout)
        ranks(layout.world_size).run(train_rank, folder=folder.path, stop_at=stop_at)
    assert folder.read_run().num_attempts == len(layouts)
    assert [record.step for record in folder.read_steps()] == list(range(1, NUM_STEPS + 1))
    np.testing.assert_allclose(_losses(folder), _losses(whole), rtol=1e-4)
    expected, found = _weights(whole), _weights(folder)
    assert expected.keys() == found.keys()


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
