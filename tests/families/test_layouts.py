"""Promise 2 for every family: each engine follows the single process."""

from __future__ import annotations

import numpy as np
import pytest

from diptych.core.records import Layout, ZeroOptions
from tests.conftest import TINY_SCHEDULE
from tests.runs import make_spec, trajectory

NUM_STEPS = 4
LAYOUTS = {
    "ddp": Layout(engine="ddp", dp=2, micro_batch=4),
    "fsdp2": Layout(engine="fsdp2", shard=2, micro_batch=4),
    "zero 2": Layout(engine="zero", shard=2, micro_batch=4, zero=ZeroOptions(stage=2)),
    "zero 3": Layout(engine="zero", shard=2, micro_batch=4, zero=ZeroOptions(stage=3)),
}


def _run(prepared, layout, ranks):
    spec = make_spec(
        prepared.corpus,
        layout=layout,
        model=prepared.case.model,
        schedule=TINY_SCHEDULE,
        num_steps=NUM_STEPS,
    )
    return ranks(layout.world_size).run(trajectory, spec=spec, num_steps=NUM_STEPS)[0]


@pytest.fixture(scope="session")
def alone_by_name():
    return {}


@pytest.mark.parametrize("name", LAYOUTS)
def test_same_loss(prepared, name, ranks, alone_by_name):
    if prepared.name not in alone_by_name:
        alone_by_name[prepared.name] = _run(prepared, Layout(micro_batch=4), ranks)
    alone, found = alone_by_name[prepared.name], _run(prepared, LAYOUTS[name], ranks)
    distance = np.linalg.norm(found["gradient"] - alone["gradient"])
    assert distance <= 1e-6 * np.linalg.norm(alone["gradient"])
    np.testing.assert_allclose(found["losses"], alone["losses"], rtol=1e-4)
    assert alone["losses"][-1] < alone["losses"][0]
