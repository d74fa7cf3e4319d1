"""The step log as arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from diptych.report.steps import Steps, read_steps, thin

from .logs import write_steps


def test_columns(tmp_path: Path) -> None:
    records = write_steps(tmp_path, num_steps=20)
    steps = read_steps(tmp_path)
    assert steps.records == tuple(records)
    assert steps.column("step").tolist() == list(range(1, 21))
    heldout = steps.column("heldout_loss")
    assert np.isnan(heldout).tolist() == [record.heldout_loss is None for record in records]
    by_hand = sorted(record.step_s for record in records)
    assert steps.median("step_s") == (by_hand[9] + by_hand[10]) / 2


def test_missing_log_is_empty(tmp_path: Path) -> None:
    steps = read_steps(tmp_path / "absent")
    assert steps == Steps(())
    assert steps.column("loss").shape == (0,)
    assert steps.median("loss") is None


def test_thin_by_hand() -> None:
    values = np.array([1.0, 3.0, np.nan, 5.0, np.nan, np.nan, 7.0])
    np.testing.assert_equal(thin(values, num_points=4), [2.0, 5.0, np.nan, 7.0])
    np.testing.assert_equal(thin(values, num_points=4, reduce="max"), [3.0, 5.0, np.nan, 7.0])
    np.testing.assert_equal(thin(values, num_points=7), values)
    assert thin(np.array([]), num_points=4).shape == (0,)
