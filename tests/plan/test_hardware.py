import os

import pytest

from diptych.core.errors import ConfigError
from diptych.plan import hardware
from diptych.plan.gpus import rates_of
from diptych.plan.hardware import ClusterParams, survey, usable_cores


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(hardware, "visible_gpus", list)


def test_this_machine_is_read(no_gpu):
    cluster = survey(ClusterParams())
    assert cluster.device.kind == "cpu"
    assert 1 <= cluster.num_cores_per_node <= len(os.sched_getaffinity(0))
    assert cluster.device.memory_bytes == cluster.host_memory_bytes > 0
    assert cluster.device.flops_per_s == {}
    assert cluster.num_devices == 1


def test_cores_follow_affinity():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000"}, 1),
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "max 100000"}, 4),
        ({"cpu.max": "20000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({}, 4),
    ],
)
def test_cores_follow_the_control_group(monkeypatch, tmp_path, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_memory_follows_the_control_group(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("123456789\n")
    assert hardware.usable_memory_bytes(tmp_path) == 123456789
    (tmp_path / name).write_text("max\n")
    assert hardware.usable_memory_bytes(tmp_path) > 123456789


def test_gpus_are_named_and_rated(monkeypatch):
    found = [("NVIDIA H100 80GB HBM3", 85_000_000_000), ("NVIDIA H100 80GB HBM3", 84_000_000_000)]
    monkeypatch.setattr(hardware, "visible_gpus", lambda: found)
    cluster = survey(ClusterParams())
    assert cluster.device.kind == "cuda"
    assert cluster.num_devices_per_node == 2
    assert cluster.device.memory_bytes == 84_000_000_000
    assert cluster.device.flops_per_s["bf16"] == 989e12
    assert cluster.device.memory_bytes_per_s == 3.35e12
    assert cluster.link_bytes_per_s == 450e9


def test_a_person_overrides_every_field(no_gpu):
    cluster = survey(
        ClusterParams(
            num_nodes=4,
            num_devices_per_node=8,
            device_kind="cuda",
            device_name="something new",
            device_memory_bytes=10,
            flops_per_s={"bf16": 2.0},
            memory_bytes_per_s=3.0,
            link_bytes_per_s=4.0,
            num_cores_per_node=5,
            host_memory_bytes=6,
        )
    )
    assert cluster.num_devices == 32
    assert cluster.device.model_dump() == {
        "kind": "cuda",
        "name": "something new",
        "memory_bytes": 10,
        "flops_per_s": {"bf16": 2.0},
        "memory_bytes_per_s": 3.0,
    }
    assert (cluster.num_cores_per_node, cluster.host_memory_bytes) == (5, 6)
    assert cluster.link_bytes_per_s == 4.0


def test_gpus_of_unknown_memory_are_refused(no_gpu):
    with pytest.raises(ConfigError, match=r"shows no GPU.*device_memory_bytes"):
        survey(ClusterParams(device_kind="cuda"))


@pytest.mark.parametrize(
    ("name", "bf16", "memory_bytes_per_s"),
    [
        ("NVIDIA H200", 989e12, 4.8e12),
        ("NVIDIA H200 NVL", 835e12, 4.8e12),
        ("NVIDIA H100 PCIe", 756e12, 2.0e12),
        ("NVIDIA A100-SXM4-40GB", 312e12, 1.555e12),
        ("NVIDIA A100 80GB PCIe", 312e12, 1.935e12),
        ("NVIDIA L4", 121e12, 300e9),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 1.008e12),
        ("Tesla V100-SXM2-16GB", None, 900e9),
    ],
)
def test_known_gpus(name, bf16, memory_bytes_per_s):
    rates = rates_of(name)
    assert rates is not None
    assert rates.flops_per_s.get("bf16") == bf16
    assert rates.memory_bytes_per_s == memory_bytes_per_s


@pytest.mark.parametrize("name", ["NVIDIA L40", "NVIDIA A10G", "NVIDIA GH200 480GB", "A 1000"])
def test_unknown_gpus_have_no_rates(name):
    assert rates_of(name) is None
