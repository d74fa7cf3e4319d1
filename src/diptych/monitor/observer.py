"""What looks at a run while it trains: step records in, metrics to sinks and alerts to people out.

It belongs to the first rank. A record is handed over in microseconds; a thread does all else, and
nothing that goes wrong in it reaches the loop.
"""

from __future__ import annotations

import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from diptych.core.records import Alert, NodeSample, RunSpec, StepRecord
from diptych.monitor.alerts import Alerts
from diptych.monitor.metrics import step_metrics
from diptych.monitor.run_folder import RunFolder
from diptych.monitor.samples import newest_samples
from diptych.monitor.sinks.queued import Metrics, QueuedSink, Sink
from diptych.monitor.sinks.tensorboard import TensorBoard
from diptych.monitor.sinks.wandb import Wandb, lineage_of
from diptych.monitor.sinks.webhook import Webhook
from diptych.monitor.tails import last_lines, parse_objects

_LOG = logging.getLogger(__name__)
_TICK_S = 1.0
_DISK_EVERY_S = 15.0
_CLOSE_S = 12.0
_MOST_WAITING = 4096
_SAMPLES_SHARE = 0.02
"""Of the time that reading samples may take: many nodes' files are read less often."""

_OLD_LOOKS = 5
"""Samples that are older than so many intervals say nothing of now."""


class Observer:
    """Metrics and alerts of one attempt.

    Args:
        folder: of the run.
        spec: of the run.
        alerts: of this attempt.
        sinks: where metrics and alerts go beside the run's folder.
    """

    def __init__(
        self, folder: RunFolder, *, spec: RunSpec, alerts: Alerts, sinks: Sequence[Sink]
    ) -> None:
        identity, observe = spec.identity, spec.placement.observe
        self._folder = folder
        self._contrast_weight = identity.contrast.weight if identity.contrast else None
        self._is_packed = identity.schedule.mode == "pack"
        self._sample_every_s = observe.sample_every_s
        self._alerts = alerts
        self._sinks = [QueuedSink(sink) for sink in sinks]
        self._queue: queue.Queue[StepRecord] = queue.Queue(_MOST_WAITING)
        self._ended = threading.Event()
        self._num_dropped = 0
        self._samples: tuple[NodeSample, ...] = ()
        self._samples_due_s = self._disk_due_s = 0.0
        self._checkpoint: tuple[int, int | None] = (0, None)
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)
        self._thread.start()

    def record(self, record: StepRecord) -> None:
        """Take a step's record; returns at once."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._num_dropped += 1

    def close(self) -> None:
        """Have what waits written; takes some seconds at most, and raises nothing."""
        until_s = time.monotonic() + _CLOSE_S
        self._ended.set()
        self._thread.join(_CLOSE_S / 2)
        for sink in self._sinks:
            sink.end()
        for sink in self._sinks:
            sink.close(until_s=until_s)
        if self._num_dropped:
            _LOG.warning("%d steps were not observed: too many waited", self._num_dropped)

    def _run(self) -> None:
        self._guard("former alerts", self._end_former_alerts)
        while not (self._ended.is_set() and self._queue.empty()):
            try:
                record = self._queue.get(timeout=0.0 if self._ended.is_set() else _TICK_S)
            except queue.Empty:
                record = None
            now_s = time.monotonic()
            if self._sample_every_s and now_s >= self._samples_due_s:
                self._guard("samples", self._look_at_samples)
            if now_s >= self._disk_due_s:
                self._disk_due_s = now_s + _DISK_EVERY_S
                self._guard("disk", self._look_at_disk)
            if record is not None:
                self._guard("metrics", lambda record=record: self._send(record))
                self._guard("alerts", lambda record=record: self._give(self._alerts.note(record)))
            else:
                self._guard("clock", lambda: self._give(self._alerts.check()))

    def _guard(self, what: str, work: Callable[[], None]) -> None:
        """Do some work; an exception is said once of each kind of work."""
        try:
            work()
        except Exception as error:  # nothing here stops training
            if what not in self._said:
                self._said.add(what)
                _LOG.warning("observing %s failed: %s: %s", what, type(error).__name__, error)

    def _send(self, record: StepRecord) -> None:
        if not self._sinks:
            return
        values = step_metrics(
            record,
            samples=self._samples,
            contrast_weight=self._contrast_weight,
            is_packed=self._is_packed,
        )
        time_s = time.time() if record.time_s is None else record.time_s
        for sink in self._sinks:
            sink.put(Metrics(record.step, time_s=time_s, values=values))

    def _look_at_samples(self) -> None:
        began_s = time.monotonic()
        within_s = _OLD_LOOKS * self._sample_every_s
        newest = newest_samples(self._folder.samples, now_s=time.time(), within_s=within_s)
        self._samples = tuple(newest.values())
        ended_s = time.monotonic()
        wait_s = max(self._sample_every_s, (ended_s - began_s) / _SAMPLES_SHARE)
        self._samples_due_s = ended_s + wait_s
        self._give(self._alerts.note_samples(self._samples))

    def _look_at_disk(self) -> None:
        usage = shutil.disk_usage(self._folder.path)
        alerts = self._alerts.note_disk(
            free_bytes=usage.free,
            total_bytes=usage.total,
            checkpoint_bytes=self._checkpoint_bytes(),
        )
        self._give(alerts)

    def _checkpoint_bytes(self) -> int | None:
        """Return the size of the newest checkpoint, counted once; None before there is one."""
        newest = self._folder.newest_checkpoint()
        if newest and newest != self._checkpoint[0]:
            folder = self._folder.checkpoints / f"step-{newest:08d}"
            with suppress(FileNotFoundError):  # it is being removed
                self._checkpoint = (newest, sum(path.stat().st_size for path in folder.rglob("*")))
        return self._checkpoint[1]

    def _give(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            if alert.over:
                _LOG.info("over: %s (step %d)", alert.kind, alert.step)
            else:
                _LOG.warning("%s: %s (step %d)", alert.kind, alert.text, alert.step)
            for sink in self._sinks:
                sink.put(alert)
            self._append(alert)

    def _append(self, alert: Alert) -> None:
        with self._folder.alerts.open("ab") as file:
            file.write(alert.model_dump_json().encode() + b"\n")

    def _end_former_alerts(self) -> None:
        """End what earlier attempts left open: this one looks anew."""
        for alert in open_alerts(self._folder.alerts):
            self._append(alert.model_copy(update={"over": True, "time_s": round(time.time(), 3)}))


def open_alerts(path: Path) -> list[Alert]:
    """Return the alerts that are not over, from the end of a run's file of alerts."""
    given: dict[str, Alert] = {}
    fields = parse_objects(last_lines(path, most_bytes=256 * 1024))
    for each in reversed(list(fields)):
        alert = Alert.model_validate(each)
        if alert.over:
            given.pop(alert.kind, None)
        else:
            given[alert.kind] = alert
    return list(given.values())


def open_observer(
    folder: RunFolder, *, spec: RunSpec, attempt: int, step: int, nodes: Sequence[str] = ()
) -> Observer:
    """Observe an attempt with the sinks and alerts that its spec asks for.

    Args:
        folder: of the run.
        spec: of the run.
        attempt: its number.
        step: how many steps are done.
        nodes: of every rank.
    """
    placement = spec.placement
    observe = placement.observe
    every = placement.checkpoint_every_steps, placement.heldout_every_steps
    alerts = Alerts(observe.alerts.kinds, attempt=attempt, step=step, nodes=nodes, slow_every=every)
    sinks: list[Sink] = []
    if "wandb" in observe.sinks:
        sinks.append(Wandb(folder.path, spec=spec, lineage=lineage_of(spec)))
    if "tensorboard" in observe.sinks:
        sinks.append(TensorBoard(folder.path / "tensorboard", attempt=attempt, first_step=step + 1))
    if observe.alerts.webhook is not None:
        sinks.append(Webhook(observe.alerts.webhook, prefix=f"run {spec.run_id}"))
    return Observer(folder, spec=spec, alerts=alerts, sinks=sinks)
