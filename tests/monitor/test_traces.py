"""A trace written by hand, of a device and of a host, whose sums are worked out here."""

from __future__ import annotations

import gzip
import json

import pytest

from diptych.monitor.traces import summarise


def _write(path, events):
    made = [
        {"ph": "X", "name": name, "cat": category, "pid": 1, "tid": lane, "ts": begin, "dur": dur}
        for name, category, lane, begin, dur in events
    ]
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [{"ph": "M", "name": "process_name"}, *made]}, file)
    return path


def test_a_device_s_kernels(tmp_path):
    """100 us: 0-40 product, 30-60 nccl (20 exposed), 60-65 small copy, then nothing till 90-100."""
    path = _write(
        tmp_path / "rank-00003.json.gz",
        [
            ("ProfilerStep#4", "user_annotation", 9, 0, 100),
            ("phase forward", "user_annotation", 9, 0, 50),
            ("phase communication", "user_annotation", 9, 10, 20),
            ("phase forward", "gpu_user_annotation", 7, 0, 50),
            ("aten::mm", "cpu_op", 9, 0, 5),
            ("ampere_sgemm_128x64_tn", "kernel", 7, 0, 40),
            ("ncclDevKernel_AllReduce_Sum_f32", "kernel", 8, 30, 30),
            ("Memcpy HtoD", "gpu_memcpy", 7, 60, 5),
            ("void at::native::vectorized_elementwise_kernel<4>", "kernel", 7, 90, 10),
        ],
    )
    found = summarise(path)
    assert (found.rank, found.num_steps, found.on_device) == (3, 1, True)
    seconds = (found.span_s, found.busy_s, found.communication_s, found.exposed_s, found.idle_s)
    assert seconds == pytest.approx((100e-6, 55e-6, 30e-6, 20e-6, 25e-6))
    assert (found.num_small, found.small_s) == (1, pytest.approx(5e-6))
    assert found.phases_s == pytest.approx({"forward": 30e-6, "communication": 20e-6})
    classes = {each.name: (each.count, each.seconds) for each in found.classes}
    assert classes == {
        "matrix products": (1, pytest.approx(40e-6)),
        "communication": (1, pytest.approx(30e-6)),
        "elementwise": (1, pytest.approx(10e-6)),
        "copies": (1, pytest.approx(5e-6)),
    }


def test_a_host_s_operators_without_what_they_call(tmp_path):
    path = _write(
        tmp_path / "rank-00000.json.gz",
        [
            ("ProfilerStep#7", "user_annotation", 1, 0, 100),
            ("ProfilerStep#8", "user_annotation", 1, 100, 100),
            ("phase communication", "user_annotation", 1, 150, 30),
            ("aten::linear", "cpu_op", 1, 0, 60),
            ("aten::addmm", "cpu_op", 1, 10, 40),
            ("aten::mul", "cpu_op", 2, 100, 20),
        ],
    )
    found = summarise(path)
    assert (found.num_steps, found.on_device, found.num_small) == (2, False, None)
    assert (found.span_s, found.busy_s) == pytest.approx((200e-6, 80e-6))
    assert (found.exposed_s, found.idle_s) == pytest.approx((30e-6, 120e-6))
    own = {each.name: each.seconds for each in found.operators}
    assert own == pytest.approx({"aten::addmm": 40e-6, "aten::linear": 20e-6, "aten::mul": 20e-6})
