"""Event files, read back by TensorBoard's own form: TFRecords of Event messages."""

from __future__ import annotations

import struct

import pytest

from diptych.core.records import Alert
from diptych.monitor.sinks.queued import Metrics
from diptych.monitor.sinks.tensorboard import TensorBoard

event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")


def read_events(path):
    """A TFRecord: length (8 bytes), checksum (4), data, checksum (4)."""
    data, place, events = path.read_bytes(), 0, []
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        event = event_pb2.Event()
        event.ParseFromString(data[place + 12 : place + 12 + length])
        events.append(event)
        place += length + 16
    return events


def write(folder, *, attempt, steps, first_step):
    sink = TensorBoard(folder, attempt=attempt, first_step=first_step)
    sink.open()
    for step in steps:
        values = {"loss/total": 10.0 * attempt + step, "lr/llm": 0.5}
        sink.write(Metrics(step, time_s=1000.0 + step, values=values))
    return sink


def test_a_step_is_one_event_with_all_its_metrics(tmp_path):
    write(tmp_path / "tensorboard", attempt=0, steps=[1, 2], first_step=1).close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert path.name.startswith("events.out.tfevents.")
    version, start, first, second = read_events(path)
    assert version.file_version == "brain.Event:2"
    assert (start.session_log.status, start.step) == (event_pb2.SessionLog.START, 1)
    assert (first.step, first.wall_time) == (1, 1001.0)
    assert {each.tag: each.simple_value for each in second.summary.value} == {
        "loss/total": 2.0,
        "lr/llm": 0.5,
    }


def test_a_resumed_run_has_readers_forget_what_is_done_again(tmp_path):
    write(tmp_path, attempt=0, steps=range(1, 8), first_step=1).close()
    write(tmp_path, attempt=1, steps=range(5, 10), first_step=5).close()
    # As TensorBoard's EventAccumulator does: a start at step n forgets what it has from n on.
    seen = {}
    for path in sorted(tmp_path.iterdir(), key=lambda path: path.name.rpartition("-")[2]):
        for event in read_events(path):
            if event.session_log.status == event_pb2.SessionLog.START:
                seen = {step: value for step, value in seen.items() if step < event.step}
            for value in event.summary.value:
                if value.tag == "loss/total":
                    assert event.step not in seen
                    seen[event.step] = value.simple_value
    assert seen == {**{step: step for step in range(1, 5)}, **{s: 10.0 + s for s in range(5, 10)}}


def test_an_alert_is_a_text(tmp_path):
    sink = write(tmp_path, attempt=0, steps=[], first_step=1)
    sink.alert(Alert(time_s=5.0, step=3, attempt=0, kind="nan", text="the loss is not finite"))
    sink.close()
    (path,) = tmp_path.iterdir()
    event = read_events(path)[-1]
    (value,) = event.summary.value
    assert event.step == 3
    assert value.tag.startswith("alerts/nan")
    assert value.metadata.plugin_data.plugin_name == "text"
    assert value.tensor.string_val[0] == b"the loss is not finite"
