"""What a node's devices are doing: NVML's module in, one `DeviceSample` per device out.

What a device does not answer is None, and is named once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from diptych.core.nvml import name_throttle_reasons
from diptych.core.records import DeviceSample

_ALL_LINKS = 0xFFFFFFFF
_KIB = 1024
_KB = 1000
_MHZ = 1e6


class Devices:
    """Some of a node's devices, asked again and again.

    Args:
        nvml: the module `pynvml`, initialised.
        entries: which devices: NVML's indices, or beginnings of UUIDs, as CUDA_VISIBLE_DEVICES
            has them.
        say: is told once of each thing that no answer came to.
        clock: seconds, of any beginning.
    """

    def __init__(
        self,
        nvml: Any,
        *,
        entries: Sequence[str],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nvml = nvml
        self._say = say
        self._clock = clock
        self._unanswered: set[str] = set()
        self._links: dict[int, tuple[float, int]] = {}
        self._handles = _find(nvml, entries=entries)
        if len(self._handles) < len(entries):
            say(f"NVML shows {len(self._handles)} of the {len(entries)} devices of this run")

    def sample(self) -> tuple[DeviceSample, ...]:
        """Ask every device; one that is lost answers nothing."""
        return tuple(self._sample(index, handle) for index, handle in self._handles)

    def _sample(self, index: int, handle: Any) -> DeviceSample:
        nvml, ask = self._nvml, self._ask
        busy = ask("utilisation", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        memory = ask("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        reasons = ask("throttling", lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return DeviceSample(
            index=index,
            busy_fraction=busy,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            power_w=ask("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            clock_hz=ask(
                "clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * _MHZ
            ),
            max_clock_hz=ask(
                "maximum clock",
                lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM) * _MHZ,
            ),
            temperature_c=ask(
                "temperature",
                lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            ),
            throttle_reasons=name_throttle_reasons(reasons or 0),
            num_ecc_errors=ask(
                "memory errors",
                lambda: int(
                    nvml.nvmlDeviceGetTotalEccErrors(
                        handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                    )
                ),
            ),
            nvlink_bytes_per_s=ask("NVLink", lambda: self._nvlink_rate(index, handle)),
            pcie_bytes_per_s=ask("PCIe", lambda: self._pcie_rate(handle)),
        )

    def _nvlink_rate(self, index: int, handle: Any) -> float | None:
        """Return what all links moved since the look before, sent and received."""
        nvml = self._nvml
        fields = [
            (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS),
            (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS),
        ]
        values = nvml.nvmlDeviceGetFieldValues(handle, fields)
        if any(value.nvmlReturn != nvml.NVML_SUCCESS for value in values):
            raise LookupError("not supported")
        now = self._clock()
        num_bytes = sum(int(value.value.ullVal) for value in values) * _KIB
        before = self._links.get(index)
        self._links[index] = (now, num_bytes)
        if before is None or now <= before[0] or num_bytes < before[1]:
            return None
        return (num_bytes - before[1]) / (now - before[0])

    def _pcie_rate(self, handle: Any) -> float:
        nvml = self._nvml
        ways = (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
        return float(sum(nvml.nvmlDeviceGetPcieThroughput(handle, way) for way in ways) * _KB)

    def _ask(self, what: str, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except Exception as error:  # NVML's errors are of a class that its module makes
            if what not in self._unanswered:
                self._unanswered.add(what)
                self._say(f"NVML does not say {what} ({error})")
            return None


def _find(nvml: Any, *, entries: Sequence[str]) -> list[tuple[int, Any]]:
    """Return (index, handle) of every device that is found; a part of a device has its own UUID."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(each) for each in range(nvml.nvmlDeviceGetCount())]
    uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    found: list[tuple[int, Any]] = []
    for place, entry in enumerate(entries):
        if entry.isdigit() and int(entry) < len(handles):
            found.append((int(entry), handles[int(entry)]))
            continue
        matches = [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]
        if entry and len(matches) == 1:
            found.append((matches[0], handles[matches[0]]))
        elif entry.startswith("MIG-"):
            try:
                found.append((place, nvml.nvmlDeviceGetHandleByUUID(entry)))
            except nvml.NVMLError:
                continue
    return found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
