"""A rank's machine; GPUs are made up: these answers of NVML are synthetic."""

from __future__ import annotations

import resource
import shutil
from collections import namedtuple
from types import SimpleNamespace

import pytest

from diptych.launch import devices
from diptych.launch.devices import (
    check_devices,
    check_files,
    check_gpu,
    check_infiniband,
    check_links,
    check_memory,
    check_shared_memory,
)

GIB = 1 << 30
Memory = namedtuple("Memory", "total free used")
Usage = namedtuple("Usage", "total used free")


class NVMLError(Exception):
    pass


class SyntheticNvml:
    """Eight GPUs as pynvml describes them; what is not said is not supported."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_NVLINK_MAX_LINKS = 18
    NVML_FEATURE_ENABLED = 1
    NVML_P2P_CAPS_INDEX_READ = 0
    NVML_P2P_STATUS_OK = 0
    NVMLError = NVMLError

    def __init__(self, *, free=78 * GIB, errors=0, reasons=0, num_links=18, apart=()):
        self.free, self.errors, self.reasons = free, errors, reasons
        self.num_links, self.apart = num_links, apart

    def nvmlSystemGetDriverVersion(self):
        return b"580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return 13010

    def nvmlDeviceGetCount(self):
        return 8

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return Memory(total=80 * GIB, free=self.free, used=80 * GIB - self.free)

    def nvmlDeviceGetTotalEccErrors(self, handle, kind, counter):
        if self.errors is None:
            raise NVMLError("Not Supported")
        return self.errors

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self.reasons

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if link >= self.num_links:
            raise NVMLError("Not Supported")
        return 1

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle):
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle):
        return 16

    def nvmlDeviceGetP2PStatus(self, handle, other, kind):
        return 2 if other in self.apart else 0


@pytest.mark.parametrize(
    ("answers", "status", "said"),
    [
        ({}, "pass", "NVIDIA H100 80GB HBM3, 78.0 GiB of 80.0 GiB free"),
        ({"free": 40 * GIB}, "warn", "40.0 GiB of 80.0 GiB free"),
        ({"errors": 2}, "fail", "2 memory errors that could not be corrected"),
        ({"errors": None}, "pass", "free"),
        # Idle and set by an application are no reason to worry; thermal slowdown is.
        ({"reasons": 0x3}, "pass", "free"),
        ({"reasons": 0x41}, "warn", "slowed down (reasons 0x41)"),
    ],
)
def test_a_gpu_s_state_is_judged(answers, status, said):
    check = check_gpu(SyntheticNvml(**answers), index=3)
    assert check.status == status
    assert said in check.found


def test_links_between_gpus_are_judged():
    check = check_links(SyntheticNvml(), index=0)
    assert (check.status, check.found) == ("pass", "18 NVLinks, PCIe 5 x16")
    check = check_links(SyntheticNvml(num_links=0, apart=(5, 6)), index=0)
    assert check.status == "warn"
    assert check.found == "0 NVLinks, PCIe 5 x16; no direct way to 2 of 7 other GPUs"


def test_without_a_gpu_its_checks_are_skipped():
    checks = {check.name: check for check in check_devices()}
    for name in ("driver", "gpu", "links"):
        assert (checks[name].status, checks[name].found) == ("skip", "no GPU here")
    assert checks["torch"].status == "pass"
    assert checks["attention"].found.startswith("sdpa, flex")


def test_a_driver_that_does_not_answer_keeps_no_run_from_starting():
    checks = {check.name: check for check in check_devices(SyntheticNvml(), index=0)}
    assert checks["driver"].found == "580.65.06, for CUDA up to 13.1"
    broken = SyntheticNvml()
    broken.nvmlDeviceGetMemoryInfo = lambda handle: (_ for _ in ()).throw(NVMLError("GPU is lost"))
    checks = {check.name: check for check in check_devices(broken, index=0)}
    assert checks["gpu"].status == "skip"
    assert "GPU is lost" in checks["gpu"].found
    assert checks["links"].status == "pass"


def test_infiniband_ports_that_are_down_are_named(tmp_path):
    assert check_infiniband(tmp_path / "absent").status == "skip"
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    check = check_infiniband(tmp_path)
    assert check.status == "warn"
    assert "mlx5_0:1 ACTIVE 400 Gb/sec (4X NDR), mlx5_1:1 DOWN" in check.found
    (tmp_path / "mlx5_1" / "ports" / "1" / "state").write_text("4: ACTIVE\n")
    assert check_infiniband(tmp_path).status == "pass"


@pytest.mark.parametrize(("free", "status"), [(64 << 20, "warn"), (2 * GIB, "pass")])
def test_a_small_shared_memory_is_said(monkeypatch, tmp_path, free, status):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(4 * GIB, 0, free))
    check = check_shared_memory(tmp_path)
    assert check.status == status
    assert check_shared_memory(tmp_path / "absent").status == "skip"


@pytest.mark.parametrize(("available", "status"), [(5, "warn"), (50, "pass")])
def test_little_free_memory_is_said(monkeypatch, available, status):
    memory = SimpleNamespace(available=available * GIB, total=100 * GIB)
    monkeypatch.setattr(devices.psutil, "virtual_memory", lambda: memory)
    assert check_memory().status == status


@pytest.mark.parametrize(
    ("limit", "status"), [(1024, "warn"), (65536, "pass"), (resource.RLIM_INFINITY, "pass")]
)
def test_few_open_files_are_said(monkeypatch, limit, status):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, 65536))
    assert check_files().status == status
