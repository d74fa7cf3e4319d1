"""Where a rank's time goes: one phase at any moment, by the clock of whoever computes.

On a CPU that is the host's clock. On a GPU a phase ends where the device comes to its end: events
in the device's queue mark it, and are read when they have passed, so nothing waits for them. What a
rank waits for in collectives that its host waits for (gloo's, all those of CPUs) is the phase
`communication`, whatever phase it interrupts; and so is what is left of a backward pass once the
gradients of this rank are computed (`Phases.turn`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.profiler import record_function

from diptych.core.records import Phase

MARK = "phase "
PHASES: tuple[Phase, ...] = get_args(Phase)
_WHOLE: frozenset[Phase] = frozenset({"checkpoint", "heldout", "profile", "communication"})
"""Phases in which waiting for others is a part of the matter."""


class Phases:
    """Adds up the seconds of each phase; `other` is what no phase was named for.

    Args:
        device: that computes.
        clock: seconds of the host's, of any beginning.

    Attributes:
        marks: whether phases are marked in the trace that torch's profiler makes.
    """

    def __init__(
        self, device: torch.device, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock: _HostClock | _DeviceClock
        self._clock = _DeviceClock(device) if device.type == "cuda" else _HostClock(clock)
        self._stack: list[Phase] = ["other"]
        self._turned: tuple[int, record_function] | None = None
        self.marks = False

    @contextmanager
    def of(self, phase: Phase) -> Iterator[None]:
        """Count the block as a phase; one inside another is taken out of it."""
        self._stack.append(phase)
        self._clock.switch(phase)
        try:
            # The profiler begins and ends within its own phase, which is none of a step's.
            is_marked = self.marks and phase != "profile"
            with record_function(f"{MARK}{phase}") if is_marked else nullcontext():
                try:
                    yield
                finally:
                    self._end_mark()
        finally:
            self._stack.pop()
            self._clock.switch(self._stack[-1])

    def turn(self, phase: Phase) -> None:
        """Count the rest of the innermost block as another phase."""
        if len(self._stack) > 1:
            self._stack[-1] = phase
            self._clock.switch(phase)
            if self.marks:
                self._end_mark()
                self._turned = (len(self._stack), record_function(f"{MARK}{phase}"))
                self._turned[1].__enter__()

    def _end_mark(self) -> None:
        """End the mark of what the innermost block has turned into."""
        if self._turned is not None and self._turned[0] == len(self._stack):
            self._turned[1].__exit__(None, None, None)
            self._turned = None

    def take(self) -> dict[Phase, float]:
        """Return the seconds since they were taken last, and begin anew.

        On a GPU what the device has not come to yet is in the next answer.
        """
        return self._clock.take(self._stack[-1])

    @contextmanager
    def watching_waits(self) -> Iterator[None]:
        """Count as communication what this thread waits for in collectives, until the block ends.

        torch's own `Work.wait`, through which all collectives called from Python go, is replaced
        meanwhile.
        """
        plain, owner = dist.Work.wait, threading.get_ident()

        def wait(work: Any, *arguments: Any, **options: Any) -> Any:
            if self._stack[-1] in _WHOLE or threading.get_ident() != owner:
                return plain(work, *arguments, **options)
            with self.of("communication"):
                return plain(work, *arguments, **options)

        dist.Work.wait = wait  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            dist.Work.wait = plain


class _HostClock:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since_s = clock()
        self._phase: Phase = "other"
        self._sums: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)

    def switch(self, phase: Phase) -> None:
        now_s = self._clock()
        self._sums[self._phase] += now_s - self._since_s
        self._since_s, self._phase = now_s, phase

    def take(self, phase: Phase) -> dict[Phase, float]:
        self.switch(phase)
        sums, self._sums = self._sums, dict.fromkeys(PHASES, 0.0)
        return sums


class _DeviceClock:
    """Events at each switch; between two of them the device was in the first one's phase."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Phase, torch.cuda.Event]] = []
        self._unused: list[torch.cuda.Event] = []
        self.switch("other")

    def switch(self, phase: Phase) -> None:
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((phase, event))

    def take(self, phase: Phase) -> dict[Phase, float]:
        self.switch(phase)
        sums: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        num_read = 0
        for (named, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if not end.query():
                break
            sums[named] += begin.elapsed_time(end) / 1000
            num_read += 1
        self._unused += [event for _, event in self._marks[:num_read]]
        del self._marks[:num_read]
        return sums
