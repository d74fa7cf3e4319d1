from __future__ import annotations

import json
import logging
import threading
import time

import pytest

from diptych.core.errors import ConfigError
from diptych.core.records import Alert, AlertsSpec, ObserveSpec
from diptych.monitor import observer as module
from diptych.monitor.alerts import Alerts
from diptych.monitor.observer import Observer, open_alerts, open_observer
from diptych.monitor.run_folder import RunFolder
from tests.launch.test_progress import record
from tests.monitor.sinks.test_queued import Listed
from tests.monitor.specs import make_spec


class Kept(Listed):
    """Keeps metrics and alerts whole."""

    def __init__(self, **options):
        super().__init__(**options)
        self.metrics, self.alerts = [], []

    def write(self, metrics):
        super().write(metrics)
        self.metrics.append(metrics)

    def alert(self, alert):
        super().alert(alert)
        self.alerts.append(alert)


def observe(folder, *, sinks=(), spec=None):
    return Observer(
        RunFolder(folder), spec=spec or make_spec(), alerts=Alerts(("nan",), attempt=1), sinks=sinks
    )


BAD = {"loss": None, "skipped": True, "num_skipped": 1}


def test_steps_go_to_every_sink_under_their_names(tmp_path):
    first, second = Kept(), Kept()
    observer = observe(tmp_path, sinks=[first, second])
    for step in (1, 2):
        observer.record(record(step, loss=step + 0.5, time_s=100.0 + step))
    observer.close()
    for sink in (first, second):
        assert [(each.step, each.time_s) for each in sink.metrics] == [(1, 101.0), (2, 102.0)]
        assert [each.values["loss/total"] for each in sink.metrics] == [1.5, 2.5]
        assert sink.calls[-1] == ("close",)


def test_samples_of_the_nodes_are_among_the_metrics(tmp_path):
    (tmp_path / "samples").mkdir()
    line = {"time_s": time.time(), "node": "a", "attempt": 0, "cpu_fraction": 0.25}
    (tmp_path / "samples" / "a.jsonl").write_text(json.dumps(line) + "\n")
    sink = Kept()
    spec = make_spec(observe=ObserveSpec(sample_every_s=60.0))
    observer = observe(tmp_path, sinks=[sink], spec=spec)
    observer.record(record(1))
    observer.close()
    assert sink.metrics[0].values["host/cpu_fraction"] == 0.25


def test_an_alert_is_kept_logged_and_given_to_sinks(tmp_path, caplog):
    sink = Kept()
    with caplog.at_level(logging.INFO):
        observer = observe(tmp_path, sinks=[sink])
        for step in range(1, 60):
            observer.record(record(step, **(BAD if step == 5 else {})))
        observer.close()
    lines = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert [(each["kind"], each["step"], each["over"]) for each in lines] == [
        ("nan", 5, False),
        ("nan", 55, True),
    ]
    assert [alert.over for alert in sink.alerts] == [False, True]
    warnings = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("nan: the loss is not finite")


def test_alerts_that_an_earlier_attempt_left_open_are_over(tmp_path):
    path = tmp_path / "alerts.jsonl"
    former = [
        Alert(time_s=1.0, step=3, attempt=0, kind="disk", text="little"),
        Alert(time_s=2.0, step=4, attempt=0, kind="stall", text="quiet"),
        Alert(time_s=3.0, step=5, attempt=0, kind="disk", text="little", over=True),
    ]
    path.write_text("".join(each.model_dump_json() + "\n" for each in former) + '{"time_s": 4.0')
    assert [alert.kind for alert in open_alerts(path)] == ["stall"]
    path.write_text("".join(each.model_dump_json() + "\n" for each in former))
    observe(tmp_path).close()
    assert open_alerts(path) == []
    last = json.loads(path.read_text().splitlines()[-1])
    assert (last["kind"], last["over"], last["step"]) == ("stall", True, 4)
    assert open_alerts(tmp_path / "none.jsonl") == []


def test_a_sink_that_fails_stops_neither_the_others_nor_the_alerts(tmp_path, caplog):
    kept = Kept()
    observer = observe(tmp_path, sinks=[Listed(fails_in="open"), kept])
    for step in range(1, 10):
        observer.record(record(step, **(BAD if step == 9 else {})))
    observer.close()
    assert len(kept.metrics) == 9
    assert len(kept.alerts) == 1
    assert caplog.text.count("listed is off from now on") == 1


def test_a_record_is_taken_at_once_whatever_sinks_do(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "_CLOSE_S", 4.0)
    gate = threading.Event()
    kept = Kept()
    observer = observe(tmp_path, sinks=[Kept(gate=gate), kept])
    for step in range(1, 500):
        observer.record(record(step))
    observer.close()
    assert "listed did not end in time and is left behind" in caplog.text
    # The other one has ended.
    assert caplog.text.count("left behind") == 1
    assert kept.calls[-1] == ("close",)
    gate.set()
    observer._thread.join(20)


def test_what_goes_wrong_within_is_said_once(tmp_path, monkeypatch, caplog):
    def broken(*arguments, **named):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(module, "step_metrics", broken)
    observer = observe(tmp_path, sinks=[Kept()])
    for step in range(1, 20):
        observer.record(record(step, **(BAD if step == 19 else {})))
    observer.close()
    assert caplog.text.count("observing metrics failed: RuntimeError: a fault of ours") == 1
    assert len(open_alerts(tmp_path / "alerts.jsonl")) == 1


def test_the_disk_needs_room_for_one_more_checkpoint(tmp_path, monkeypatch):
    checkpoint = tmp_path / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights.safetensors").write_bytes(b"x" * 5000)
    (checkpoint / "checksums.json").write_text("{}")
    usage = module.shutil.disk_usage(tmp_path)._replace(total=10_000, free=4_000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    alerts = Alerts(("disk",), attempt=0)
    observer = Observer(RunFolder(tmp_path), spec=make_spec(), alerts=alerts, sinks=[])
    until_s = time.monotonic() + 20
    while not open_alerts(tmp_path / "alerts.jsonl") and time.monotonic() < until_s:
        time.sleep(0.01)
    observer.close()
    (alert,) = open_alerts(tmp_path / "alerts.jsonl")
    assert "one more checkpoint takes 4.9 KiB" in alert.text


def test_the_sinks_are_those_that_the_spec_names(tmp_path, monkeypatch):
    made = []
    for name in ("Wandb", "TensorBoard", "Webhook"):
        monkeypatch.setattr(
            module, name, lambda *arguments, name=name, **named: made.append(name) or Listed()
        )
    for sinks, webhook in (((), None), (("tensorboard", "wandb"), None), ((), "HOOK")):
        spec = make_spec(
            observe=ObserveSpec(sample_every_s=0.0, sinks=sinks, alerts=AlertsSpec(webhook=webhook))
        )
        open_observer(RunFolder(tmp_path), spec=spec, attempt=0, step=0).close()
        made.append("|")
    assert made == ["|", "Wandb", "TensorBoard", "|", "Webhook", "|"]


def test_a_webhook_without_an_address_is_said_and_stops_nothing(tmp_path, caplog):
    spec = make_spec(
        observe=ObserveSpec(sample_every_s=0.0, alerts=AlertsSpec(webhook="DIPTYCH_NO_SUCH"))
    )
    observer = open_observer(RunFolder(tmp_path), spec=spec, attempt=0, step=0)
    observer.record(record(1))
    observer.close()
    assert "names DIPTYCH_NO_SUCH, which the first rank's environment lacks" in caplog.text
    assert ConfigError.__name__ in caplog.text


def test_alerts_for_wandb_need_wandb():
    with pytest.raises(ValueError, match="put wandb into sinks"):
        ObserveSpec(alerts=AlertsSpec(wandb=True))
