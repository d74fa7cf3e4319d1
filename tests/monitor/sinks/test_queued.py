from __future__ import annotations

import logging
import threading
import time

import pytest

from diptych.core.records import Alert
from diptych.monitor.sinks.queued import Metrics, QueuedSink

ALERT = Alert(time_s=1.0, step=2, attempt=0, kind="nan", text="a loss")


class Listed:
    """Keeps what it is called with; `gate` holds it up, `fails_in` raises."""

    name = "listed"

    def __init__(self, *, gate=None, fails_in=""):
        self.calls, self.gate, self.fails_in = [], gate, fails_in
        self.thread = None

    def _call(self, name, *what):
        self.thread = threading.current_thread().name
        if self.gate is not None:
            assert self.gate.wait(20)
        if name == self.fails_in:
            raise ConnectionError("no such service")
        self.calls.append((name, *what))

    def open(self):
        self._call("open")

    def write(self, metrics):
        self._call("write", metrics.step)

    def alert(self, alert):
        self._call("alert", alert.kind)

    def close(self):
        self._call("close")


def metrics(step):
    return Metrics(step, time_s=float(step), values={"loss/total": 1.0})


def close(sink, *, within_s=20.0):
    sink.close(until_s=time.monotonic() + within_s)


def test_everything_is_written_in_order_by_one_thread():
    listed = Listed()
    sink = QueuedSink(listed)
    for item in (metrics(1), ALERT, metrics(2)):
        sink.put(item)
    close(sink)
    assert listed.calls == [
        ("open",),
        ("write", 1),
        ("alert", "nan"),
        ("write", 2),
        ("close",),
    ]
    assert listed.thread == "sink listed"


def test_a_sink_for_which_nothing_came_is_never_opened():
    listed = Listed()
    close(QueuedSink(listed))
    assert listed.calls == []


@pytest.mark.parametrize("where", ["open", "write", "alert", "close"])
def test_the_first_error_turns_a_sink_off_with_one_warning(where, caplog):
    listed = Listed(fails_in=where)
    with caplog.at_level(logging.WARNING):
        sink = QueuedSink(listed)
        for _ in range(3):
            sink.put(metrics(1))
            sink.put(ALERT)
        close(sink)
        sink.put(metrics(2))
    told = [record.message for record in caplog.records]
    assert told == ["listed is off from now on: ConnectionError: no such service"]
    assert sink.failed
    assert len(listed.calls) <= 7


def test_what_does_not_fit_is_counted_and_said(caplog):
    gate = threading.Event()
    listed = Listed(gate=gate)
    with caplog.at_level(logging.WARNING):
        sink = QueuedSink(listed, most_waiting=4)
        sink.put(metrics(1))
        while sink._queue.qsize():
            time.sleep(0.001)  # the first one is in the sink's hands
        for step in range(2, 12):
            sink.put(metrics(step))
        assert sink.num_dropped == 6
        gate.set()
        close(sink)
    steps = [call[1] for call in listed.calls if call[0] == "write"]
    assert steps == [1, 2, 3, 4, 5]
    told = [record.message for record in caplog.records]
    assert told[0] == "listed is slower than the steps: some are left out"
    assert told[1] == "listed lacks 6 steps or alerts"


def test_a_sink_that_hangs_is_left_behind(caplog):
    gate = threading.Event()
    listed = Listed(gate=gate)
    sink = QueuedSink(listed)
    sink.put(metrics(1))
    with caplog.at_level(logging.WARNING):
        close(sink, within_s=0.05)
    assert "listed did not end in time and is left behind" in caplog.text
    gate.set()


def test_what_waits_in_a_full_queue_is_written_at_the_end():
    gate = threading.Event()
    listed = Listed(gate=gate)
    sink = QueuedSink(listed, most_waiting=3)
    for step in range(1, 5):
        sink.put(metrics(step))
        while step == 1 and sink._queue.qsize():
            time.sleep(0.001)
    sink.end()
    gate.set()
    close(sink)
    assert listed.calls == [("open",), *(("write", step) for step in range(1, 5)), ("close",)]
