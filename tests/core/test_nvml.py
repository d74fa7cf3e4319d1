import pytest

from diptych.core.nvml import name_throttle_reasons, select_visible


@pytest.mark.parametrize(
    ("reasons", "names"),
    [
        (0x0, ()),
        # nvml.h: idle and clocks that an application set slow nothing down against its will.
        (0x3, ()),
        (0x4, ("sw_power_cap",)),
        (0x68, ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown")),
        (0x80, ("hw_power_brake_slowdown",)),
        (0x100001, ("0x100000",)),
    ],
)
def test_what_slows_a_device_is_named(reasons, names):
    assert name_throttle_reasons(reasons) == names


@pytest.mark.parametrize(
    ("variable", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        ("0,7,1", [0]),
        ("GPU-b", [1]),
        ("GPU-", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(variable, indices):
    assert select_visible(variable, uuids=["GPU-a1", "GPU-b2", "GPU-c3"]) == indices
