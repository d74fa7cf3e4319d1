"""Promise 2: every layout follows the single process, with ranks that have no image at all."""

from __future__ import annotations

import numpy as np
import pytest

from diptych.core.records import Layout
from tests.conftest import TINY_MODEL, TINY_PACKS, TINY_SCHEDULE
from tests.runs import make_spec, trajectory

NUM_STEPS = 20
LAYOUTS = {
    "ddp, 2 ranks": Layout(engine="ddp", dp=2, micro_batch=4),
    "ddp, 2 ranks, accumulated": Layout(engine="ddp", dp=2, micro_batch=2),
    "ddp, 2 ranks, accumulated, synced every time": Layout(
        engine="ddp", dp=2, micro_batch=2, grad_sync="every"
    ),
    "fsdp2, 2 ranks": Layout(engine="fsdp2", shard=2, micro_batch=4),
    "fsdp2, 2 ranks, accumulated": Layout(engine="fsdp2", shard=2, micro_batch=1),
    "fsdp2, 2 ranks, accumulated, synced every time": Layout(
        engine="fsdp2", shard=2, micro_batch=2, grad_sync="every"
    ),
    "one process, accumulated": Layout(micro_batch=1),
    "ddp, 3 ranks (8 rows do not divide)": Layout(engine="ddp", dp=3, micro_batch=1),
    "hsdp, 2 x 2 ranks": Layout(engine="fsdp2", dp=2, shard=2, micro_batch=2),
}


PACKED_LAYOUTS = {
    "ddp, 2 ranks": Layout(engine="ddp", dp=2, micro_batch=1),
    "fsdp2, 2 ranks": Layout(engine="fsdp2", shard=2, micro_batch=3),
    "ddp, 4 ranks (6 rows do not divide)": Layout(engine="ddp", dp=4, micro_batch=1),
}


def _run(ranks, corpus, layout, *, schedule=TINY_SCHEDULE, **arguments):
    spec = make_spec(corpus, layout=layout, model=TINY_MODEL, schedule=schedule)
    return ranks(layout.world_size).run(trajectory, spec=spec, **arguments)[0]


@pytest.fixture(scope="module")
def references():
    return {}


@pytest.mark.parametrize("name", LAYOUTS)
def test_same_loss(name, ranks, corpus, references):
    if "float32" not in references:
        references["float32"] = _run(ranks, corpus, Layout(micro_batch=8), num_steps=NUM_STEPS)
    reference = references["float32"]
    found = _run(ranks, corpus, LAYOUTS[name], num_steps=NUM_STEPS)
    difference = np.linalg.norm(found["gradient"] - reference["gradient"])
    assert difference <= 1e-6 * np.linalg.norm(reference["gradient"])
    np.testing.assert_allclose(found["losses"], reference["losses"], rtol=1e-4)
    # The losses must move, or the comparison would hold for a model that learns nothing.
    assert reference["losses"][-1] < 0.9 * reference["losses"][0]


@pytest.mark.parametrize("name", PACKED_LAYOUTS)
def test_same_loss_packed(name, ranks, corpus, references):
    packed = {"schedule": TINY_PACKS, "num_steps": NUM_STEPS}
    if "packed" not in references:
        references["packed"] = _run(ranks, corpus, Layout(micro_batch=6), **packed)
    reference = references["packed"]
    found = _run(ranks, corpus, PACKED_LAYOUTS[name], **packed)
    difference = np.linalg.norm(found["gradient"] - reference["gradient"])
    assert difference <= 1e-6 * np.linalg.norm(reference["gradient"])
    np.testing.assert_allclose(found["losses"], reference["losses"], rtol=1e-4)
    assert reference["losses"][-1] < 0.9 * reference["losses"][0]


def test_ranks_without_an_image_are_among_them(ranks, corpus):
    found = _run(ranks, corpus, LAYOUTS["fsdp2, 2 ranks"], num_steps=NUM_STEPS)
    assert found["imageless"] > 0


@pytest.mark.parametrize("name", ["ddp, 2 ranks, accumulated", "fsdp2, 2 ranks"])
def test_same_gradient_in_float64(name, ranks, corpus):
    reference = _run(ranks, corpus, Layout(micro_batch=8), num_steps=1, dtype="float64")
    found = _run(ranks, corpus, LAYOUTS[name], num_steps=1, dtype="float64")
    difference = np.linalg.norm(found["gradient"] - reference["gradient"])
    assert difference <= 1e-12 * np.linalg.norm(reference["gradient"])


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_same_loss_in_bf16(engine, ranks, corpus, references):
    size = {"dp": 2} if engine == "ddp" else {"shard": 2}
    layout = Layout(engine=engine, micro_batch=4, precision="bf16", **size)
    reference = _run(ranks, corpus, Layout(micro_batch=8), num_steps=NUM_STEPS)
    found = _run(ranks, corpus, layout, num_steps=NUM_STEPS)
    np.testing.assert_allclose(found["losses"], reference["losses"], rtol=2e-2)
    assert not np.array_equal(found["losses"], reference["losses"])
