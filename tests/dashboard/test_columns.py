"""Lines become columns: what was not measured is NaN, what is no line of ours is left out."""

from __future__ import annotations

import numpy as np

from diptych.dashboard.columns import parse_samples, parse_steps
from tests.dashboard.folders import lines, observed, sample
from tests.launch.test_progress import record


def test_steps_become_columns():
    found = parse_steps(lines([observed(9), observed(10)]))
    assert found["step"].tolist() == [9, 10]
    assert found["loss"].tolist() == [np.float32(4 / 9), np.float32(0.4)]
    assert np.isnan(found["heldout_loss"][0])
    assert found["heldout_loss"][1] == 2.5
    assert found["loss_by_source.<b>pages</b>"].tolist() == [10.0, 11.0]
    assert found["phases_s.backward.mean"].tolist() == [0.25, 0.25]
    assert found["phases_s.backward.most"].tolist() == [0.5, 0.5]
    assert found["time_s"].tolist() == [1.7e9 + 9, 1.7e9 + 10]


def test_lines_of_a_former_release_have_fewer_columns():
    data = record(1).model_dump_json(exclude={"phases_s", "mfu", "time_s", "memory_bytes"})
    found = parse_steps(data.encode() + b"\n")
    assert "mfu" not in found
    assert not [name for name in found if name.startswith("phases_s")]


def test_a_column_that_begins_later_is_nan_before():
    found = parse_steps(lines([record(1), observed(2)]))
    assert np.isnan(found["phases_s.forward.mean"][0])
    assert found["phases_s.forward.mean"][1] == np.float32(0.2)


def test_what_is_no_record_is_left_out():
    whole = lines([observed(1)]) + b'{"step": \n[1, 2]\n{"loss": 3}\nnoise\n' + lines([observed(2)])
    found = parse_steps(whole)
    assert found["step"].tolist() == [1, 2]
    assert found["loss"].tolist() == [4.0, 2.0]
    assert parse_steps(b"") == {}
    assert parse_steps(b'"text"\n') == {}
    assert parse_steps(b'{"step": "one"}\n') == {}


def test_samples_have_a_column_per_device():
    found = parse_samples(lines([sample(0), sample(1, devices=(), cpu_fraction=None), sample(2)]))
    busy = found["devices.1.busy_fraction"]
    assert busy[[0, 2]].tolist() == [0.75, 0.75]
    assert np.isnan(busy[1])
    assert np.isnan(found["cpu_fraction"][1])
    assert found["devices.0.power_w"][0] == 300.0
    assert np.isnan(found["devices.1.power_w"]).all()
    assert found["devices.1.throttle_reasons"][0] == 2
    assert found["devices.0.throttle_reasons"][0] == 0
