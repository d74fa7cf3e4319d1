"""What sinks have in common: a bounded queue and a thread, so that none slows or stops a run."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from diptych.core.records import Alert

_LOG = logging.getLogger(__name__)
_MOST_WAITING = 4096
_LOOK_S = 0.5


@dataclass(frozen=True)
class Metrics:
    """The metrics of one step, and when it ended, in seconds since 1970."""

    step: int
    time_s: float
    values: Mapping[str, float]


class Sink(Protocol):
    """Where metrics and alerts go. All of it is called in one thread, in this order."""

    name: str

    def open(self) -> None:
        """Begin; may take seconds."""

    def write(self, metrics: Metrics) -> None:
        """Take the metrics of a step."""

    def alert(self, alert: Alert) -> None:
        """Take an alert."""

    def close(self) -> None:
        """Write out what was taken."""


class QueuedSink:
    """A sink in a thread of its own; it is opened when the first thing comes for it.

    The first exception ends the sink with one warning. What comes while the queue is full is
    dropped and counted.
    """

    def __init__(self, sink: Sink, *, most_waiting: int = _MOST_WAITING) -> None:
        self._sink = sink
        self._queue: queue.Queue[Metrics | Alert | None] = queue.Queue(most_waiting)
        self._ended = threading.Event()
        self._failed = False
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"sink {sink.name}", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the sink takes nothing any more."""
        return self._failed

    def put(self, item: Metrics | Alert) -> None:
        """Hand over metrics or an alert; returns at once."""
        if self._failed:
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            if not self.num_dropped:
                _LOG.warning("%s is slower than the steps: some are left out", self._sink.name)
            self.num_dropped += 1

    def end(self) -> None:
        """Let the sink end once what waits is written; returns at once."""
        self._ended.set()
        with suppress(queue.Full):
            self._queue.put_nowait(None)

    def close(self, *, until_s: float) -> None:
        """End, wait up to a moment of the monotonic clock, and say what is missing."""
        self.end()
        self._thread.join(max(0.0, until_s - time.monotonic()))
        num_left = self.num_dropped
        if self._thread.is_alive():
            num_left += sum(item is not None for item in list(self._queue.queue))
            _LOG.warning("%s did not end in time and is left behind", self._sink.name)
        if num_left:
            _LOG.warning("%s lacks %d steps or alerts", self._sink.name, num_left)

    def _run(self) -> None:
        try:
            item = self._next()
            # Loader processes are forked before the first step is done, and what is imported while
            # they are could stay locked in them.
            if item is None:
                return
            self._sink.open()
            while item is not None:
                if isinstance(item, Metrics):
                    self._sink.write(item)
                else:
                    self._sink.alert(item)
                item = self._next()
            self._sink.close()
        except Exception as error:  # a sink stops no training
            self._failed = True
            told = " ".join(str(error).split())[:300]
            _LOG.warning(
                "%s is off from now on: %s: %s", self._sink.name, type(error).__name__, told
            )
            self._drain()

    def _next(self) -> Metrics | Alert | None:
        """Wait for what comes next; None where nothing more does."""
        while True:
            try:
                item = self._queue.get(timeout=_LOOK_S)
            except queue.Empty:
                item = None
            if item is not None or self._ended.is_set():
                return item

    def _drain(self) -> None:
        """Let go of what waits: nothing takes it."""
        while True:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                return
