"""What a person should look at now: step records, samples and a clock in, alerts out. Pure.

Each kind is given once, and once more when it is over. Who is told is unknown here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from diptych.core.records import Alert, AlertKind, NodeSample, StepRecord
from diptych.monitor.rules import (
    FINE,
    CommunicationRule,
    DeviceMemoryRule,
    DiskRule,
    DivergenceRule,
    HostMemoryRule,
    NanRule,
    StallRule,
    StragglerRule,
    ThroughputRule,
)

_OF_USUAL_STEPS: frozenset[AlertKind] = frozenset(
    {"throughput", "straggler", "communication", "host_memory", "device_memory"}
)
"""Kinds that compare steps with others; a profiled step is like none of them."""


class Alerts:
    """The alerts of one attempt.

    Args:
        kinds: which are given.
        attempt: its number.
        step: how many steps were done when it began.
        nodes: of every rank, where they are known.
        slow_every: after multiples of these, a step may take long.
        clock: seconds, of any beginning.
        wall: seconds since 1970.
    """

    def __init__(
        self,
        kinds: Sequence[AlertKind],
        *,
        attempt: int,
        step: int = 0,
        nodes: Sequence[str] = (),
        slow_every: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._kinds = frozenset(kinds)
        self._attempt = attempt
        self._step = step
        self._clock = clock
        self._wall = wall
        self._given: dict[AlertKind, str] = {}
        self._memory = HostMemoryRule()
        self._disk = DiskRule()
        self._stall = StallRule(start_s=clock(), slow_every=slow_every)
        self._rules: dict[AlertKind, Callable[[StepRecord], str | None]] = {
            "nan": NanRule().note,
            "divergence": DivergenceRule().note,
            "stall": lambda record: self._stall.note(record, now_s=self._clock()),
            "throughput": ThroughputRule().note,
            "straggler": StragglerRule(nodes).note,
            "host_memory": self._memory.note,
            "device_memory": DeviceMemoryRule().note,
            "communication": CommunicationRule().note,
        }

    def note(self, record: StepRecord) -> list[Alert]:
        """Take a step in, right after it was done."""
        self._step = record.step
        left_out = _OF_USUAL_STEPS if record.profiled else frozenset()
        return self._judge(
            {kind: rule(record) for kind, rule in self._rules.items() if kind not in left_out}
        )

    def note_samples(self, samples: Sequence[NodeSample]) -> list[Alert]:
        """Take in the newest sample of each node."""
        return self._judge({"host_memory": self._memory.note_samples(samples)})

    def note_disk(
        self, *, free_bytes: int, total_bytes: int, checkpoint_bytes: int | None
    ) -> list[Alert]:
        """Take in the room where checkpoints go, and the newest one's size, if there is one."""
        judgement = self._disk.note(
            free_bytes=free_bytes, total_bytes=total_bytes, checkpoint_bytes=checkpoint_bytes
        )
        return self._judge({"disk": judgement})

    def check(self) -> list[Alert]:
        """Look at the clock: whether a step is long overdue."""
        return self._judge({"stall": self._stall.check(now_s=self._clock())})

    def _judge(self, judgements: dict[AlertKind, str | None]) -> list[Alert]:
        alerts = []
        for kind, judgement in judgements.items():
            if kind not in self._kinds or judgement is None:
                continue
            if judgement == FINE and kind in self._given:
                alerts.append(self._alert(kind, self._given.pop(kind), over=True))
            elif judgement != FINE and kind not in self._given:
                self._given[kind] = judgement
                alerts.append(self._alert(kind, judgement))
        return alerts

    def _alert(self, kind: AlertKind, text: str, *, over: bool = False) -> Alert:
        return Alert(
            time_s=round(self._wall(), 3),
            step=self._step,
            attempt=self._attempt,
            kind=kind,
            text=text,
            over=over,
        )
