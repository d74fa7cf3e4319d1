"""A run whose micro-batches are padded to few shapes and lie in the same buffers: the same losses.

The whole way of the settings, from the run's spec to the steps of real ranks.
"""

from __future__ import annotations

import numpy as np
import pytest

from diptych.core.records import Layout, MemoryOptions
from diptych.monitor.run_folder import RunFolder
from tests.conftest import TINY_MODEL, TINY_PACKS, TINY_SCHEDULE
from tests.runs import make_spec, train_rank

MEMORY = MemoryOptions(token_multiple=64, patch_multiple=256, reuse_buffers=True)
COUNTS = ("num_rows", "num_label_tokens", "num_text_tokens", "num_image_tokens", "num_patches")


def _steps(ranks, corpus, folder, *, schedule, **layout):
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    spec = make_spec(corpus, layout=Layout(**layout), model=TINY_MODEL, schedule=schedule)
    run.write_spec(spec)
    ranks(Layout(**layout).world_size).run(train_rank, folder=folder)
    return run.read_steps()


@pytest.mark.parametrize("schedule", [TINY_SCHEDULE, TINY_PACKS], ids=["bucket", "pack"])
def test_the_same_losses_and_counts(schedule, ranks, corpus, tmp_path):
    plain = _steps(ranks, corpus, tmp_path / "plain", schedule=schedule, micro_batch=2)
    padded = _steps(
        ranks, corpus, tmp_path / "padded", schedule=schedule, micro_batch=2, memory=MEMORY
    )
    for found, expected in zip(padded, plain, strict=True):
        for name in COUNTS:
            assert getattr(found, name) == getattr(expected, name)
        np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-4)
        assert found.padding_fraction > expected.padding_fraction
    heldout = [
        [step.heldout_loss for step in steps if step.heldout_loss is not None]
        for steps in (padded, plain)
    ]
    np.testing.assert_allclose(*heldout, rtol=1e-4)
    assert len(heldout[0]) > 1
