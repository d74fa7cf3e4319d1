"""A trace of torch's profiler in, what a person should know of it out.

Chrome's format: a list of events with begin and duration in microseconds. Where a device's kernels
are in it, they count; else the host's operators, each without those that it calls.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.core.errors import FormatError, RunError
from diptych.core.records import Operator, TraceSummary

_SMALL_US = 10.0
_MOST_OPERATORS = 12
_NAME = re.compile(r"rank-(\d+)\.json\.gz")
_STEP = re.compile(r"ProfilerStep#\d+")
_PHASE = "phase "
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_COLLECTIVE = re.compile(r"^nccl|ncclDevKernel|^gloo:|c10d::|_c10d_functional", re.IGNORECASE)
_CLASSES = (
    ("communication", _COLLECTIVE),
    ("attention", re.compile(r"flash|fmha|attention|scaled_dot_product", re.IGNORECASE)),
    (
        "matrix products",
        re.compile(r"gemm|cutlass|cublas|xmma|matmul|::(add|ba)?m[mv]\b|::bmm|linear", re.I),
    ),
    ("convolutions", re.compile(r"conv", re.IGNORECASE)),
    ("optimizer", re.compile(r"adam|multi_tensor|_foreach|optimizer", re.IGNORECASE)),
    ("copies", re.compile(r"memcpy|memset|copy|::to\b|::cat\b|::clone", re.IGNORECASE)),
    ("reductions, norms", re.compile(r"norm|softmax|reduce|::sum|::mean|loss", re.IGNORECASE)),
    ("elementwise", re.compile(r"elementwise|vectorized|::mul|::add|gelu|silu", re.IGNORECASE)),
)


@dataclass(frozen=True)
class _Event:
    name: str
    category: str
    lane: tuple[Any, Any]
    begin_us: float
    end_us: float

    @property
    def us(self) -> float:
        return self.end_us - self.begin_us


def find_traces(traces: Path) -> dict[int, Path]:
    """Return the newest profile's traces by rank.

    Raises:
        RunError: there is none.
    """
    folders = sorted(traces.glob("step-*"))
    for folder in reversed(folders):
        found = {int(named[1]): path for path in folder.iterdir() if (named := _match(path))}
        if found:
            return dict(sorted(found.items()))
    raise RunError(
        f"There is no trace in {traces}",
        cure=f"Ask for one while the run goes on: kedro profile {traces.parent.name}",
    )


def _match(path: Path) -> re.Match[str] | None:
    return _NAME.fullmatch(path.name)


def summarise(path: Path) -> TraceSummary:
    """Sum up one rank's trace.

    Raises:
        FormatError: it is no such trace.
    """
    events = _read(path)
    steps = [event for event in events if _STEP.fullmatch(event.name)]
    device = [event for event in events if event.category in _ON_DEVICE]
    ran = device or [event for event in events if event.category == "cpu_op"]
    span_us = _end(device or steps or events) - _begin(steps or events)
    return TraceSummary(
        path=path.as_posix(),
        rank=_rank(path),
        num_steps=len({step.name for step in steps}),
        on_device=bool(device),
        span_s=span_us / 1e6,
        **_times(ran, span_us=span_us, phases_s=_phases(events), on_device=bool(device)),
    )


def _times(
    ran: Sequence[_Event], *, span_us: float, phases_s: dict[str, float], on_device: bool
) -> dict[str, Any]:
    communication, busy = _spans(ran)
    together_us, busy_us = _length([*communication, *busy]), _length(busy)
    times = {
        "busy_s": busy_us / 1e6,
        "communication_s": _length(communication) / 1e6,
        "exposed_s": (together_us - busy_us) / 1e6,
        "idle_s": max(0.0, (span_us - together_us) / 1e6),
        "phases_s": phases_s,
    }
    if on_device:
        own = [(event.name, event.us) for event in ran]
        small = [event.us for event in ran if event.us < _SMALL_US]
        times |= {"num_small": len(small), "small_s": sum(small) / 1e6}
    else:
        own = _own_times(ran)
        # A host that waits for others runs no operator.
        times["exposed_s"] = phases_s.get("communication", times["exposed_s"])
    operators = _most(own)[:_MOST_OPERATORS]
    return {**times, "operators": operators, "classes": _most((_class(n), us) for n, us in own)}


def _rank(path: Path) -> int:
    named = _NAME.fullmatch(path.name)
    return int(named[1]) if named else 0


def _phases(events: Sequence[_Event]) -> dict[str, float]:
    """Return the seconds of each phase that the loop has marked."""
    marked = [e for e in events if e.name.startswith(_PHASE) and not _copied(e)]
    phases: dict[str, float] = defaultdict(float)
    for name, us in _own_times(marked):
        phases[name.removeprefix(_PHASE)] += us / 1e6
    return dict(phases)


def _read(path: Path) -> list[_Event]:
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            found = json.load(file)["traceEvents"]
        events = [_event(each) for each in found if each.get("ph") == "X"]
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(
            f"{path} is no trace of torch's profiler ({type(error).__name__}: {error})",
            cure="Profile again: kedro profile",
        ) from error
    if not events:
        raise FormatError(f"{path} has no event", cure="Profile again: kedro profile")
    return events


def _event(found: Mapping[str, Any]) -> _Event:
    begin = float(found["ts"])
    return _Event(
        name=str(found["name"]),
        category=str(found.get("cat", "")),
        lane=(found.get("pid"), found.get("tid")),
        begin_us=begin,
        end_us=begin + float(found.get("dur", 0.0)),
    )


def _end(events: Sequence[_Event]) -> float:
    return max(event.end_us for event in events)


def _begin(events: Sequence[_Event]) -> float:
    return min(event.begin_us for event in events)


def _copied(event: _Event) -> bool:
    """Whether an annotation is the one that the profiler shows among a device's kernels."""
    return event.category.startswith("gpu_")


def _own_times(events: Iterable[_Event]) -> list[tuple[str, float]]:
    """Return each event's time without that of the events within it, on the same lane."""
    lanes: dict[Any, list[_Event]] = defaultdict(list)
    for event in events:
        lanes[event.lane].append(event)
    own: list[tuple[str, float]] = []
    for lane in lanes.values():
        open_ones: list[list[Any]] = []
        for event in sorted(lane, key=lambda each: (each.begin_us, -each.end_us)):
            while open_ones and open_ones[-1][0].end_us <= event.begin_us:
                ended, within_us = open_ones.pop()
                own.append((ended.name, max(0.0, ended.us - within_us)))
            if open_ones:
                open_ones[-1][1] += event.us
            open_ones.append([event, 0.0])
        own += [(event.name, max(0.0, event.us - within_us)) for event, within_us in open_ones]
    return own


def _spans(events: Iterable[_Event]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return when collectives ran, and when anything else did."""
    communication, busy = [], []
    for event in events:
        where = communication if _COLLECTIVE.search(event.name) else busy
        where.append((event.begin_us, event.end_us))
    return communication, busy


def _length(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of a union of spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _class(name: str) -> str:
    return next((kind for kind, pattern in _CLASSES if pattern.search(name)), "other")


def _most(ran: Iterable[tuple[str, float]]) -> tuple[Operator, ...]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, us in ran:
        sums[name][0] += us
        sums[name][1] += 1
    found = [
        Operator(name=name, seconds=us / 1e6, count=int(count))
        for name, (us, count) in sums.items()
    ]
    return tuple(sorted(found, key=lambda each: -each.seconds))
