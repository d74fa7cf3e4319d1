"""Checkpoints of earlier format versions, as they lie on people's disks, are gone on with."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from tests.golden.checkpoint_v1 import make as version_1

EXPECTED = json.loads((version_1.FOLDER / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", version_1.LAYOUTS)
def test_a_checkpoint_of_version_1_is_gone_on_with(name, ranks, tmp_path):
    folder = tmp_path / name
    shutil.copytree(version_1.FOLDER / name, folder)
    (found,) = ranks(1).run(version_1.go_on, folder=folder, name=name)
    expected = EXPECTED[name]
    assert found["tensors"] == expected["tensors"]
    assert found["engine"] == expected["engine"]
    assert found["num_updates"] == 3
    assert found["num_masked"] == 2
    assert found["loader"] == {
        "epoch": 1,
        "step": 4,
        "first_step": 3,
        "schedule_sha256": "2" * 64,
        "masked_keys": list(version_1.MASKED),
        "skipped_steps": [version_1.SKIPPED],
    }
    # Another machine's kernels may round otherwise; its checkpoints do not.
    rtol = 1e-5 if name == "fp32" else 1e-2
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=rtol)
    np.testing.assert_allclose(found["grad_norms"], expected["grad_norms"], rtol=rtol)
