"""TensorBoard: metrics in, event files in the run's folder out, one event a step.

A run that goes on writes a file of its own, whose first event has readers forget the steps that
are done again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diptych.core.records import Alert
from diptych.monitor.sinks.queued import Metrics

_FLUSH_S = 10.0


class TensorBoard:
    """Event files of one attempt.

    Args:
        folder: of the event files.
        attempt: its number is in the file's name.
        first_step: the first step that the attempt takes; what other files have from there on is
            of work that is done again.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, *, attempt: int, first_step: int) -> None:
        self._folder = folder
        self._attempt = attempt
        self._first_step = first_step
        self._writer: Any = None
        self._events: Any = None
        self._summaries: Any = None
        self._flushed_s = 0.0

    def open(self) -> None:
        """Begin a file.

        Raises:
            ImportError: tensorboardX is not installed.
        """
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._events, self._summaries = event_pb2, summary_pb2
        self._folder.mkdir(parents=True, exist_ok=True)
        suffix = f".attempt-{self._attempt:03d}"
        self._writer = EventsWriter(str(self._folder / "events"), suffix)
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.write_event(
            self._events.Event(wall_time=time.time(), step=self._first_step, session_log=start)
        )

    def write(self, metrics: Metrics) -> None:
        """Write one event with all metrics of a step."""
        value = self._summaries.Summary.Value
        values = [value(tag=name, simple_value=each) for name, each in metrics.values.items()]
        self._event(metrics.step, time_s=metrics.time_s, values=values)

    def alert(self, alert: Alert) -> None:
        """Write an alert as text."""
        from tensorboardX.summary import text

        told = f"{'over: ' if alert.over else ''}{alert.text}"
        values = text(f"alerts/{alert.kind}", told).value
        self._event(alert.step, time_s=alert.time_s, values=values)

    def close(self) -> None:
        """Write out the file."""
        self._writer.close()

    def _event(self, step: int, *, time_s: float, values: Iterable[Any]) -> None:
        summary = self._summaries.Summary(value=list(values))
        event = self._events.Event(wall_time=time_s, step=step, summary=summary)
        self._writer.write_event(event)
        if time.monotonic() - self._flushed_s >= _FLUSH_S:
            self._flushed_s = time.monotonic()
            self._writer.flush()
