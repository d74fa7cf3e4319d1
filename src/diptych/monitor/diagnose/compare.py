"""Two runs' signals in, where the difference of their speed lies out.

What is expected of a run is the other's seconds, for as many tokens a rank as it has itself. So the
seconds above that, part by part, add up to what it lacks of the speedup that its ranks promise:
with S ranks for one, T seconds taken and E expected, the speedup is S E / T, and each second lost
takes S / T of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from diptych.core.records import Comparison, Part, PartName, Phase
from diptych.monitor.diagnose.signals import Signals
from diptych.monitor.diagnose.times import Imbalance, Times

_PHASES: dict[PartName, tuple[Phase, ...]] = {
    "data": ("data",),
    "computing": ("place", "forward", "backward"),
    "update": ("update",),
    "checkpoint": ("checkpoint",),
    "heldout": ("heldout",),
    "other": ("other",),
}
_SAME = 0.02
"""A difference below that is none."""


def compare(
    signals: Signals,
    *,
    against: Signals,
    run_ids: tuple[str, str],
    num_ranks: tuple[int, int],
    settings: Sequence[str] = (),
) -> Comparison:
    """Say how much faster a run is than another, and what keeps it from more.

    Args:
        signals: of the run.
        against: of the other one.
        run_ids: the run's name, and the other's.
        num_ranks: the run's, and the other's.
        settings: lines of what differs in their settings.
    """
    ideal = num_ranks[0] / num_ranks[1]
    took_s, base_s = _whole_step_s(signals), _whole_step_s(against)
    speedup = signals.num_tokens / against.num_tokens * base_s / took_s
    parts = _split(signals, against=against, ideal=ideal)
    unmeasured = [
        f"where ranks' time went in run {name} (phases_s)"
        for name, each in zip(run_ids, (signals, against), strict=True)
        if each.times is None
    ]
    return Comparison(
        run_id=run_ids[0],
        against_id=run_ids[1],
        num_ranks=num_ranks[0],
        against_num_ranks=num_ranks[1],
        step_s=took_s,
        against_step_s=base_s,
        speedup=speedup,
        ideal=ideal,
        verdict=_verdict(speedup, ideal=ideal, parts=parts),
        parts=tuple(parts),
        settings=tuple(settings),
        missing=tuple(unmeasured),
    )


def _split(signals: Signals, *, against: Signals, ideal: float) -> list[Part]:
    if signals.times is None or against.times is None:
        return []
    work = signals.num_tokens / against.num_tokens / ideal
    took_s = _whole_step_s(signals)
    took = _seconds(signals.times, imbalance=signals.imbalance, step_s=took_s)
    base = _seconds(against.times, imbalance=against.imbalance, step_s=_whole_step_s(against))
    parts = [
        Part(
            name=name,
            expected_s=base[name] * work,
            took_s=took[name],
            missing=ideal * (took[name] - base[name] * work) / took_s,
        )
        for name in took
    ]
    return sorted(parts, key=lambda part: -abs(part.missing))


def _seconds(times: Times, *, imbalance: Imbalance | None, step_s: float) -> dict[PartName, float]:
    """Split a step's mean seconds into parts that add up to them."""
    uneven = min(times.waiting, _predicted(times, imbalance=imbalance))
    shares: dict[PartName, float] = {
        "communication": times.share("communication") - times.waiting,
        "straggling": times.waiting - uneven,
        "imbalance": uneven,
        **{name: times.share(*phases) for name, phases in _PHASES.items()},
    }
    return {name: share * step_s for name, share in shares.items()}


def _predicted(times: Times, *, imbalance: Imbalance | None) -> float:
    """Return what ranks should wait for the rows that they were given, by the rows' cost."""
    if imbalance is None or imbalance.predicted is None:
        return 0.0
    return imbalance.predicted * (times.latest["forward"] + times.latest["backward"])


def _whole_step_s(signals: Signals) -> float:
    """Return a step's mean seconds, with what stands between it and the next where measured."""
    if signals.times is None:
        return signals.num_tokens / signals.tokens_per_s
    return signals.times.total_s / signals.num_steps


def _verdict(speedup: float, *, ideal: float, parts: Sequence[Part]) -> str:
    said = f"{speedup:.3g} times as fast"
    if ideal != 1.0:
        said += f", of {ideal:.3g} that its ranks promise"
    grave = [part for part in parts if abs(part.missing) >= _SAME * ideal]
    if not grave:
        return f"{said}; no part of a step explains more than {_SAME:.0%}" if parts else said
    words = (f"{part.name} {-part.missing:+.2g}" for part in grave[:4])
    return f"{said}: {', '.join(words)}"
