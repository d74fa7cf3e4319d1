"""NVML's answers are made up here, in the units that its reference gives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from diptych.monitor.devices import Devices
from tests.launch.test_devices import GIB, NVMLError, SyntheticNvml


class Busy(SyntheticNvml):
    """Eight GPUs at work; `lacks` names the questions that they do not answer."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139
    NVML_SUCCESS = 0

    def __init__(self, *, lacks=(), **answers):
        super().__init__(**answers)
        self.lacks = lacks
        self.link_kib = 0

    def __getattribute__(self, name):
        if name.startswith("nvmlDevice") and name in object.__getattribute__(self, "lacks"):
            raise NVMLError("Not Supported")
        return super().__getattribute__(name)

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}{handle}-abcd".encode()

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "MIG-1234":
            raise NVMLError("Not Found")
        return 5

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetPowerUsage(self, handle):
        return 612_500

    def nvmlDeviceGetClockInfo(self, handle, clock):
        return 1410

    def nvmlDeviceGetMaxClockInfo(self, handle, clock):
        return 1980

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 71

    def nvmlDeviceGetPcieThroughput(self, handle, way):
        return 3000 if way == self.NVML_PCIE_UTIL_TX_BYTES else 1000

    def nvmlDeviceGetFieldValues(self, handle, fields):
        assert [each[0] for each in fields] == [138, 139]
        value = SimpleNamespace(ullVal=self.link_kib)
        return [SimpleNamespace(nvmlReturn=0, value=value) for _ in fields]


def test_a_device_is_described_in_base_units():
    said = []
    devices = Devices(Busy(errors=0, reasons=0x1 | 0x4 | 0x40), entries=["3"], say=said.append)
    (sample,) = devices.sample()
    assert sample.index == 3
    assert sample.busy_fraction == pytest.approx(0.87)
    assert (sample.memory_used_bytes, sample.memory_total_bytes) == (2 * GIB, 80 * GIB)
    assert sample.power_w == pytest.approx(612.5)
    assert (sample.clock_hz, sample.max_clock_hz) == (1.41e9, 1.98e9)
    assert sample.temperature_c == 71.0
    assert sample.throttle_reasons == ("sw_power_cap", "hw_thermal_slowdown")
    assert sample.num_ecc_errors == 0
    assert sample.pcie_bytes_per_s == 4e6
    assert not said


def test_nvlink_is_a_rate_since_the_look_before():
    nvml, times = Busy(), iter([10.0, 12.0, 14.0])
    devices = Devices(nvml, entries=["0"], say=lambda text: None, clock=lambda: next(times))
    assert devices.sample()[0].nvlink_bytes_per_s is None
    nvml.link_kib = 1_000_000
    # Two counters, each in KiB, over two seconds.
    assert devices.sample()[0].nvlink_bytes_per_s == pytest.approx(1_000_000 * 1024)
    nvml.link_kib = 5
    assert devices.sample()[0].nvlink_bytes_per_s is None


def test_what_is_not_supported_is_missing_and_said_once():
    said = []
    nvml = Busy(errors=None, lacks=("nvmlDeviceGetPowerUsage", "nvmlDeviceGetFieldValues"))
    devices = Devices(nvml, entries=["0", "1"], say=said.append)
    for _ in range(3):
        first, second = devices.sample()
    for sample in (first, second):
        assert sample.power_w is None
        assert sample.nvlink_bytes_per_s is None
        assert sample.num_ecc_errors is None
        assert sample.temperature_c == 71.0
    assert sorted(said) == [
        "NVML does not say NVLink (Not Supported)",
        "NVML does not say memory errors (Not Supported)",
        "NVML does not say power (Not Supported)",
    ]


def test_a_device_that_is_lost_still_has_a_sample():
    nvml = Busy(lacks=[name for name in dir(Busy) if name.startswith("nvmlDeviceGet")])
    nvml.lacks = [name for name in nvml.lacks if "Handle" not in name and "Count" not in name]
    nvml.lacks.remove("nvmlDeviceGetUUID")
    (sample,) = Devices(nvml, entries=["2"], say=lambda text: None).sample()
    assert sample.model_dump(exclude_defaults=True) == {"index": 2}


@pytest.mark.parametrize(
    ("entries", "indices"),
    [
        (["5", "1"], [5, 1]),
        (["GPU-33", "GPU-00-abcd"], [3, 0]),
        (["0", "GPU-none", "MIG-none"], [0]),
        (["MIG-1234"], [0]),
    ],
)
def test_devices_are_found_by_index_or_uuid(entries, indices):
    said = []
    devices = Devices(Busy(), entries=entries, say=said.append)
    assert [sample.index for sample in devices.sample()] == indices
    missing = [f"NVML shows {len(indices)} of the {len(entries)} devices of this run"]
    assert said == (missing if len(indices) < len(entries) else [])
