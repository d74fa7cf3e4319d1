"""Runs whose towers train unlike: the same on every engine, resumed exactly, told in a folder."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diptych.core.records import Layout, TowerRates, ZeroOptions
from diptych.monitor.run_folder import RunFolder
from diptych.parallel import storage
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec, train_rank

NUM_STEPS = 6
LAYOUTS = {
    "single": Layout(micro_batch=4),
    "ddp": Layout(engine="ddp", dp=2, micro_batch=4),
    "fsdp2": Layout(engine="fsdp2", shard=2, micro_batch=4),
    "zero 2": Layout(engine="zero", shard=2, micro_batch=4, zero=ZeroOptions(stage=2)),
    "zero 3": Layout(engine="zero", shard=2, micro_batch=4, zero=ZeroOptions(stage=3)),
}
FROZEN = "model.language_model.layers.0.*"
MODEL = TINY_MODEL.model_copy(update={"freeze": (FROZEN,)})


def start(folder, corpus, layout):
    run = RunFolder(folder)
    run.path.mkdir()
    spec = make_spec(
        corpus,
        layout=layout,
        model=MODEL,
        schedule=TINY_SCHEDULE,
        num_steps=NUM_STEPS,
        identity={"ema_decay": 0.8, "label_smoothing": 0.1},
        lr=3e-3,
        towers={
            "vision": TowerRates(lr=1e-4, weight_decay=0.0, layer_decay=0.5),
            "connector": TowerRates(lr=1e-2),
        },
        lr_schedule="wsd",
        decay_steps=2,
    )
    run.write_spec(spec)
    return run


@pytest.fixture(scope="module")
def trained(ranks, corpus, tmp_path_factory):
    """Call with a layout's name; each is trained once."""
    known = {}

    def get(name):
        if name not in known:
            run = start(tmp_path_factory.mktemp("trained") / "run", corpus, LAYOUTS[name])
            ranks(LAYOUTS[name].world_size).run(train_rank, folder=run.path)
            known[name] = run
        return known[name]

    return get


def weights_of(run, weights="trained"):
    folder = run.checkpoints / f"step-{NUM_STEPS:08d}"
    return storage.read_weights(folder, weights=weights)


@pytest.mark.parametrize("name", [each for each in LAYOUTS if each != "single"])
def test_every_engine_follows_one_process(name, trained):
    one, run = trained("single"), trained(name)
    for column in ("loss", "heldout_loss"):
        expected = [getattr(each, column) for each in one.read_steps()]
        found = [getattr(each, column) for each in run.read_steps()]
        assert [each is None for each in found] == [each is None for each in expected]
        np.testing.assert_allclose(
            [each for each in found if each], [each for each in expected if each], rtol=1e-4
        )
    assert run.read_what_trains() == one.read_what_trains()
    for kind in ("trained", "ema"):
        expected, found = weights_of(one, kind), weights_of(run, kind)
        for weight, tensor in expected.items():
            torch.testing.assert_close(found[weight], tensor, rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", ["single", "fsdp2", "zero 3"])
def test_stopped_and_resumed_it_is_the_same_to_the_last_bit(name, trained, ranks, corpus, tmp_path):
    whole, run = trained(name), start(tmp_path / "run", corpus, LAYOUTS[name])
    for stop_at in (3, None):
        ranks(LAYOUTS[name].world_size).run(train_rank, folder=run.path, stop_at=stop_at)
    assert [each.loss for each in run.read_steps()] == [each.loss for each in whole.read_steps()]
    for kind in ("trained", "ema"):
        expected, found = weights_of(whole, kind), weights_of(run, kind)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[weight], found[weight]) for weight in expected)


def test_the_mean_lags_behind_and_what_is_frozen_stays(trained, corpus):
    from diptych.data.processor import read_processor_info
    from diptych.model.assemble import build

    info = read_processor_info(corpus.processor)
    model = build(MODEL, tokens=info.tokens, image=info.image, seed=0)
    weights, means = weights_of(trained("single")), weights_of(trained("single"), "ema")
    for name, first in model.named_parameters():
        if name.startswith(FROZEN.removesuffix("*")):
            assert torch.equal(weights[name], first)
            assert torch.equal(means[name], first)
        else:
            assert not torch.equal(weights[name], means[name])
            lag, way = (torch.linalg.vector_norm(weights[name] - x) for x in (means[name], first))
            assert lag < way


def test_the_folder_tells_what_trains_and_every_step_its_rates(trained):
    run = trained("single")
    rows = {
        (row.tower, row.optimizer): (row.lr, row.num_tensors) for row in run.read_what_trains().rows
    }
    assert rows["connector", "adamw"][0] == pytest.approx(1e-2)
    assert rows["language", None] == (None, 11)
    rates = [round(row.lr, 9) for row in run.read_what_trains().rows if row.tower == "vision"]
    # The last block, the first, and the embeddings before it.
    assert rates == [1e-4, 5e-5, 2.5e-5]
    steps = run.read_steps()
    # Two steps of warm-up, and two of the fall from the whole rate to a twentieth.
    assert [round(each.lr / 3e-3, 6) for each in steps] == [0.5, 1.0, 1.0, 1.0, 1.0, 0.525]
    for each in steps:
        assert each.lr_by_tower == pytest.approx(
            {"vision": each.lr / 30, "connector": each.lr / 0.3}
        )
