"""`data`: ranks wait for batches, and it is not that the processors which decode are busy."""

from __future__ import annotations

from diptych.core.records import Change, Finding
from diptych.monitor.diagnose.findings import change, finding, percent, ramp
from diptych.monitor.diagnose.settings import Settings
from diptych.monitor.diagnose.signals import Signals

LEAST, SURE = 0.15, 0.30
"""Share of the time that ranks wait for batches."""
BUSY_LOADERS, BUSY_CORES = 0.85, 0.9
"""So busy a loader is bound by its core, and a node by all of its cores."""
_ONE_RANK = 0.8
"""Share of what ranks lose to a later one that is lost to the same."""


def judge_data(signals: Signals, *, settings: Settings) -> Finding | None:
    """Judge what ranks wait for batches, where decoding has cores to spare, or that is unknown."""
    cost = data_cost(signals, settings=settings)
    if cost < LEAST or decoders_are_busy(signals):
        return None
    return finding(
        "data",
        "Ranks wait for batches",
        cost=cost,
        confidence=ramp(cost, least=LEAST, sure=SURE),
        evidence=(*waiting_evidence(signals), _unbusy(signals)),
        steps=signals.data_worst,
        changes=data_changes(signals, settings=settings, cost=cost),
    )


def data_cost(signals: Signals, *, settings: Settings) -> float:
    """Return the share of the time that better loading saves on all ranks.

    Where one rank alone is late with batches that it makes itself, the others' share counts; see
    `straggler`. Loaders beside the steps look like that where all of them are equally slow: who is
    first late stays late, and meanwhile the others' are ready.
    """
    times = signals.times
    if times is None:
        return signals.data_wait
    if late_rank(signals) is not None and settings.num_workers == 0:
        return max(0.0, 2 * times.share("data") - times.latest["data"])
    return times.latest["data"]


def late_rank(signals: Signals) -> int | None:
    """Return the rank whose batches nearly all of the waiting is for, if there is one."""
    imbalance = signals.imbalance
    if imbalance is None or imbalance.rank_phase != "data" or imbalance.dominance < _ONE_RANK:
        return None
    return imbalance.rank


def decoders_are_busy(signals: Signals) -> bool:
    """Whether loader processes, or all cores of their node, have no time left."""
    hosts = signals.hosts
    if hosts is None:
        return False
    loaders = hosts.loaders is not None and hosts.loaders >= BUSY_LOADERS
    all_cores = hosts.cpu is not None and hosts.cpu >= BUSY_CORES
    return loaders or (all_cores and hosts.num_loaders is not None)


def waiting_evidence(signals: Signals) -> tuple[str | None, ...]:
    """Say how long ranks wait, and what their devices show of it."""
    devices, times = signals.devices, signals.times
    late = late_rank(signals)
    mean = f", {percent(times.share('data'))} on average" if times is not None else ""
    swing = None
    if devices is not None and devices.busy_low is not None and devices.busy_high is not None:
        swing = (
            f"devices are between {percent(devices.busy_low)} and {percent(devices.busy_high)} busy"
        )
    return (
        f"the slowest rank waits for batches in {percent(signals.data_wait)} of the time{mean}",
        None
        if late is None
        else f"it is rank {late} in most steps: who is first late stays late, but if it is that "
        "rank in other runs, too, look at its machine",
        swing,
    )


def data_changes(signals: Signals, *, settings: Settings, cost: float) -> list[Change | None]:
    """List what makes batches come sooner."""
    more = more_workers(signals, settings=settings)
    none_yet = settings.num_workers == 0
    features = settings.vision_is_frozen and not settings.has_vision_features
    return [
        change(
            "train.num_workers",
            more,
            why="batches are made beside the step, not in it"
            if none_yet
            else f"{settings.num_workers} loaders a rank make batches more slowly than steps take",
            gain=cost,
        ),
        change(
            "train.vision_features",
            "data/05_model_input/features",
            why="the frozen vision tower's output is read instead of images",
        )
        if features
        else None,
        change(
            "train.image_cache",
            "data/05_model_input/images",
            why="from the second epoch on no image is decoded",
        )
        if settings.image_cache is None
        else None,
    ]


def more_workers(signals: Signals, *, settings: Settings) -> int:
    """Return how many loaders a rank should have: twice as many, as far as there are cores."""
    hosts = signals.hosts
    wanted = max(2, 2 * settings.num_workers)
    if hosts is None or not hosts.num_cores:
        return wanted
    ranks_per_node = max(1, settings.num_ranks // hosts.num_nodes)
    free = hosts.num_cores // ranks_per_node - 1
    return max(settings.num_workers + 1, min(wanted, free))


def _unbusy(signals: Signals) -> str | None:
    hosts = signals.hosts
    if hosts is None or hosts.loaders is None:
        return None
    return f"loaders are {percent(hosts.loaders)} busy: they wait, for the disk or the network, too"
