"""`decode_cpu`: ranks wait for batches because the cores that decode images are all busy."""

from __future__ import annotations

from diptych.core.records import Finding
from diptych.monitor.diagnose.findings import change, finding, percent, ramp
from diptych.monitor.diagnose.rules.data import (
    LEAST,
    SURE,
    data_changes,
    data_cost,
    decoders_are_busy,
    waiting_evidence,
)
from diptych.monitor.diagnose.settings import Settings
from diptych.monitor.diagnose.signals import Signals


def judge_decode_cpu(signals: Signals, *, settings: Settings) -> Finding | None:
    """Judge what ranks wait for batches, where decoding has no core to spare."""
    cost = data_cost(signals, settings=settings)
    if cost < LEAST or not decoders_are_busy(signals):
        return None
    changes = data_changes(signals, settings=settings, cost=cost)
    if not _has_cores(signals):
        # More processes would share the same cores.
        changes = [each for each in changes if each and each.setting != "train.num_workers"]
        changes.append(
            change(
                "prepare.processor.max_area_px",
                "less",
                why="smaller images are decoded and cut into patches in less time",
            )
        )
    return finding(
        "decode_cpu",
        "Decoding images takes all the processors that it has",
        cost=cost,
        confidence=ramp(cost, least=LEAST, sure=SURE),
        evidence=(*waiting_evidence(signals), _busy(signals)),
        steps=signals.data_worst,
        changes=changes,
    )


def _has_cores(signals: Signals) -> bool:
    hosts = signals.hosts
    return hosts is None or hosts.cpu is None or hosts.cpu < 0.9


def _busy(signals: Signals) -> str:
    hosts = signals.hosts
    assert hosts is not None, "busy decoders were measured"
    said = []
    if hosts.loaders is not None and hosts.loaders_cores is not None:
        said.append(
            f"{hosts.num_loaders} loaders keep {hosts.loaders_cores:.1f} cores busy "
            f"({percent(hosts.loaders)} of a core each)"
        )
    if hosts.cpu is not None:
        cores = f" {hosts.num_cores}" if hosts.num_cores else ""
        said.append(f"the node's{cores} cores are {percent(hosts.cpu)} busy")
    return "; ".join(said)
