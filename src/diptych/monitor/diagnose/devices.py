"""What nodes and devices were doing: samples in, a few numbers of hosts and devices out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from diptych.core.records import DeviceSample, NodeSample, Record
from diptych.monitor.diagnose.measured import known, mean, quantile, ratio
from diptych.monitor.thin import stretch_of

_BUSY = 0.2
"""Below that a device is idle, and its clock may fall without harm."""
_ENDS = 9
"""How many samples at a window's begin and end are compared."""


class Throttled(Record):
    """The device that was slowed down most, over samples in which it was busy.

    `share` of them name a reason; `clock` is its clock in those over what it can have, None where
    clocks were not measured.
    """

    node: str
    index: int
    share: float
    clock: float | None
    reasons: tuple[str, ...]


class Devices(Record):
    """Devices over all samples; fractions from 0 to 1.

    `busy_low` and `busy_high` are the 15th and 85th percentile of how busy devices were; what was
    not measured is None. `memory` is the fullest device's.
    """

    num: int
    busy: float | None
    busy_low: float | None
    busy_high: float | None
    memory: float | None
    power_w: float | None
    throttled: Throttled | None


class Hosts(Record):
    """Hosts over all samples.

    `cpu` is the busiest node's share of cores, `loaders` how busy a loader process is there, of one
    core; `num_loaders` and `num_cores` are that node's. `free_memory` is the least share of
    memory that was available on any.
    """

    num_nodes: int
    num_cores: int | None
    cpu: float | None
    num_loaders: int | None
    loaders_cores: float | None
    loaders: float | None
    free_memory: float | None


def spread_evenly(samples: Sequence[NodeSample]) -> list[NodeSample]:
    """Thin out samples so that a mean over them is one over time.

    The files of a long run hold old samples further apart than new ones (`monitor.thin`).
    """
    by_node: defaultdict[str, list[NodeSample]] = defaultdict(list)
    for sample in samples:
        by_node[sample.node].append(sample)
    stretch_s = max(map(_stretch_s, by_node.values()), default=0.0)
    if not stretch_s:
        return list(samples)
    firsts: dict[tuple[str, float], NodeSample] = {}
    for sample in samples:
        firsts.setdefault((sample.node, sample.time_s // stretch_s), sample)
    return list(firsts.values())


def _stretch_s(samples: Sequence[NodeSample]) -> float:
    """Return how far a node's old samples are apart; 0 where new ones are as far."""
    if len(samples) < 2 * _ENDS:
        return 0.0
    times = [sample.time_s for sample in samples]
    old_s, new_s = stretch_of(times[:_ENDS]), stretch_of(times[-_ENDS:])
    return old_s if old_s > new_s else 0.0


def measure_devices(samples: Sequence[NodeSample]) -> Devices | None:
    """Sum up devices; None where none was sampled."""
    found = [(sample.node, device) for sample in samples for device in sample.devices]
    if not found:
        return None
    busy = [each.busy_fraction for _, each in found]
    return Devices(
        num=len({(node, device.index) for node, device in found}),
        busy=mean(busy),
        busy_low=quantile(busy, part=0.15),
        busy_high=quantile(busy, part=0.85),
        memory=max(known(_filled(each) for _, each in found), default=None),
        power_w=mean([each.power_w for _, each in found]),
        throttled=_throttled(found),
    )


def measure_hosts(samples: Sequence[NodeSample]) -> Hosts | None:
    """Sum up hosts; None without samples."""
    if not samples:
        return None
    busiest = _busiest(samples)
    cores = mean([each.loaders_cpu_cores for each in busiest])
    num_loaders = max(known(each.num_loaders for each in busiest), default=0) or None
    return Hosts(
        num_nodes=len({sample.node for sample in samples}),
        num_cores=busiest[0].num_cores,
        cpu=mean([each.cpu_fraction for each in busiest]),
        num_loaders=num_loaders,
        loaders_cores=cores,
        loaders=ratio(cores, num_loaders),
        free_memory=min(known(map(_free, samples)), default=None),
    )


def _free(sample: NodeSample) -> float | None:
    return ratio(sample.memory_available_bytes, sample.memory_total_bytes)


def _busiest(samples: Sequence[NodeSample]) -> list[NodeSample]:
    """Return the samples of the node whose cores are busiest."""
    by_node: defaultdict[str, list[NodeSample]] = defaultdict(list)
    for sample in samples:
        by_node[sample.node].append(sample)
    return max(by_node.values(), key=lambda seen: mean(one.cpu_fraction for one in seen) or 0.0)


def _filled(device: DeviceSample) -> float | None:
    return ratio(device.memory_used_bytes, device.memory_total_bytes)


def _clock(device: DeviceSample) -> float | None:
    return ratio(device.clock_hz, device.max_clock_hz)


def _harms(reason: str, *, clock: float | None) -> bool:
    """Whether a reason slows a busy device: heat and failing power do, a power cap by the clock."""
    name = reason.lower()
    if any(word in name for word in ("thermal", "brake", "hw_slowdown")):
        return True
    return "power" in name and clock is not None and clock < 0.8


def _throttled(found: Sequence[tuple[str, DeviceSample]]) -> Throttled | None:
    by_device: defaultdict[tuple[str, int], list[DeviceSample]] = defaultdict(list)
    for node, device in found:
        if device.busy_fraction is None or device.busy_fraction >= _BUSY:
            by_device[node, device.index].append(device)
    worst = max(
        (_slowed(place, seen) for place, seen in by_device.items()),
        key=lambda each: each.share * (1.0 - (each.clock or 0.0)),
        default=None,
    )
    return worst if worst is not None and worst.share > 0 else None


def _slowed(place: tuple[str, int], seen: Sequence[DeviceSample]) -> Throttled:
    slowed = [
        device
        for device in seen
        if any(_harms(reason, clock=_clock(device)) for reason in device.throttle_reasons)
    ]
    return Throttled(
        node=place[0],
        index=place[1],
        share=len(slowed) / len(seen),
        clock=mean([_clock(device) for device in slowed]),
        reasons=tuple(sorted({reason for device in slowed for reason in device.throttle_reasons})),
    )
