"""A checkpoint of a CPU goes on on a GPU and back; `make gpu-check` runs it."""

from __future__ import annotations

import numpy as np
import pytest

from diptych.core.records import Layout

pytestmark = pytest.mark.gpu
LAYOUTS = {"cpu": Layout(), "cuda": Layout(device="cuda")}


@pytest.fixture(autouse=True)
def gpu():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")


@pytest.mark.parametrize(("before", "after"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")])
def test_another_device_goes_on(before, after, ranks, tmp_path):
    from tests.parallel.reshard import load, save

    folder = tmp_path / "step-00000003"
    went = ranks(1).run(save, layout=LAYOUTS[before], folder=folder)[0]
    found = ranks(1).run(load, layout=LAYOUTS[after], folders={before: folder})[0][before]
    assert found.begun.digests == went.begun.digests
    np.testing.assert_allclose(found.losses, went.losses, rtol=1e-4)
