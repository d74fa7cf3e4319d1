"""All rules over a window of steps: records and samples in, one `Diagnosis` out."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.core.records import Diagnosis, Finding, NodeSample, StepRecord
from diptych.monitor.diagnose.findings import LOW, percent
from diptych.monitor.diagnose.rules import RULES
from diptych.monitor.diagnose.settings import Settings
from diptych.monitor.diagnose.signals import Signals, measure

_DANGERS = ("nan_risk", "diverging")
"""What makes a run worthless comes before what makes it slow."""
_CAUSES = {"straggler": ("throttling",)}
"""Bounds that are only seen through others, and what explains those others."""
_EXPLAINED = 0.6
_FEW_STEPS = 20
_MOST_OTHER = 0.1


def diagnose(
    records: Sequence[StepRecord],
    *,
    run_id: str,
    samples: Sequence[NodeSample] = (),
    settings: Settings | None = None,
    steps: tuple[int, int] | None = None,
) -> Diagnosis:
    """Name what bounds a run, the gravest first.

    Args:
        records: of its steps, in order; not empty.
        run_id: its name.
        samples: of its nodes.
        settings: None where they are not known; changes then suppose the defaults.
        steps: the first and the last step to judge; None judges all.
    """
    signals = measure(records, samples=samples, settings=settings, steps=steps)
    findings = judge(signals, settings=settings or Settings())
    return Diagnosis(
        run_id=run_id,
        first_step=signals.first_step,
        last_step=signals.last_step,
        healthy=not findings,
        verdict=_verdict(findings, signals=signals),
        findings=tuple(findings),
        missing=tuple(_missing(signals, settings=settings)),
    )


def judge(signals: Signals, *, settings: Settings) -> list[Finding]:
    """Ask every rule, and order what they found: dangers, then time by what it surely costs."""
    asked = [rule(signals, settings=settings) for rule in RULES]
    found = [each for each in asked if each is not None and each.confidence >= LOW]
    bounds = {each.bound for each in found}
    return sorted(
        found, key=lambda each: (each.bound not in _DANGERS, -_weight(each, bounds=bounds))
    )


def _weight(found: Finding, *, bounds: set[str]) -> float:
    explained = any(cause in bounds for cause in _CAUSES.get(found.bound, ()))
    weight = found.confidence * (found.cost or 0.0)
    return weight * (_EXPLAINED if explained else 1.0)


def _verdict(findings: Sequence[Finding], *, signals: Signals) -> str:
    if not findings:
        return f"Healthy: nothing found in {signals.num_steps} steps that bounds or endangers it."
    first, *others = findings
    cost = "" if first.cost is None else f", which costs {percent(first.cost)} of the time"
    more = f" {len(others)} more below." if others else ""
    return f"{first.title}{cost}.{more}"


def _missing(signals: Signals, *, settings: Settings | None) -> list[str]:
    """Say what was not measured, and which bounds could not be judged without it."""
    unknown = {
        "where ranks' time went (phases_s): communication, straggler, vision_imbalance, "
        "evaluation, host_launch, small_kernels; checkpoint by slow steps alone": signals.times
        is None,
        "MFU and HFU: small_kernels": signals.mfu is None and signals.hfu is None,
        "the devices' memory (memory_bytes): fragmentation, memory": signals.memory is None,
        "losses of 20 steps: diverging, learning_rate": not signals.learning.loss_parts,
        "the run's settings (run_spec.json): changes suppose the defaults": settings is None,
        f"more than {signals.num_steps} steps: all that is judged is uncertain": signals.num_steps
        < _FEW_STEPS,
    }
    said = [text for text, is_missing in unknown.items() if is_missing]
    return [*_unsampled(signals), *said, *_profiled(signals), *_unnamed(signals)]


def _unsampled(signals: Signals) -> list[str]:
    devices, hosts = signals.devices, signals.hosts
    if hosts is None:
        return ["samples of nodes: decode_cpu, throttling, host_launch, small_kernels, memory"]
    said = []
    if devices is None:
        said.append("devices: throttling, host_launch, small_kernels")
    elif devices.busy is None:
        said.append("how busy devices were: host_launch, small_kernels")
    if hosts.loaders is None:
        said.append("what loader processes compute (loaders_cpu_cores): decode_cpu")
    return said


def _profiled(signals: Signals) -> list[str]:
    if signals.profiled:
        return ["steps without a profile: all of these took longer than the run's own"]
    num = signals.num_left_out
    return [f"the times of {num} profiled steps, which took longer: left out"] if num else []


def _unnamed(signals: Signals) -> list[str]:
    other = 0.0 if signals.times is None else signals.times.share("other")
    if other < _MOST_OTHER:
        return []
    return [f"what {percent(other)} of the time went to: it is in no phase"]
