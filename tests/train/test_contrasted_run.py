"""Runs with a contrastive loss: the same numbers in their records on every layout, and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from diptych.core.records import ContrastSpec, Layout, ZeroOptions
from diptych.monitor.run_folder import RunFolder
from tests.conftest import TINY_MODEL, TINY_PACKS
from tests.runs import make_spec, train_rank

NUM_STEPS = 4
LAYOUTS = {
    "one by one": Layout(micro_batch=1),
    "ddp": Layout(engine="ddp", dp=3, micro_batch=1),
    "fsdp2": Layout(engine="fsdp2", shard=2, micro_batch=3),
    "zero 3": Layout(engine="zero", shard=2, micro_batch=1, zero=ZeroOptions(stage=3)),
}


@pytest.fixture(scope="module")
def steps_of(ranks, corpus, tmp_path_factory):
    """Train on a layout and return its step records."""

    def get(layout, contrast=ContrastSpec(weight=2.0)):  # noqa: B008 - frozen
        run = RunFolder(tmp_path_factory.mktemp("contrasted") / "run")
        run.path.mkdir()
        spec = make_spec(
            corpus,
            layout=layout,
            model=TINY_MODEL,
            schedule=TINY_PACKS,
            num_steps=NUM_STEPS,
            checkpoint_every_steps=0,
            identity={"contrast": contrast},
            lr=3e-3,
        )
        run.write_spec(spec)
        ranks(layout.world_size).run(train_rank, folder=run.path)
        return run.read_steps()

    return get


@pytest.fixture(scope="module")
def alone(steps_of):
    return steps_of(Layout(micro_batch=6))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_records_the_same_two_losses(name, steps_of, alone):
    found = steps_of(LAYOUTS[name])
    for column in ("loss", "vision_loss", "grad_norm"):
        values = [getattr(each, column) for each in found]
        np.testing.assert_allclose(values, [getattr(each, column) for each in alone], rtol=1e-4)


def test_it_falls_beside_a_loss_that_stays_that_of_language(steps_of, alone):
    plain = steps_of(Layout(micro_batch=6), contrast=None)
    assert [each.vision_loss for each in plain] == [None] * NUM_STEPS
    vision = [each.vision_loss for each in alone]
    assert vision[-1] < 0.9 * vision[0]
    # Before the first update both have the same weights, and so the same loss over labels.
    assert alone[0].loss == pytest.approx(plain[0].loss, rel=1e-6)
    assert alone[0].grad_norm > plain[0].grad_norm
