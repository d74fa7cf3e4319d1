"""Offline runs of Weights & Biases, really written, and read back by wandb's own messages."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest

from diptych.core.records import Alert, AlertsSpec, LaunchSpec, ObserveSpec, RaySpec, WandbSpec
from diptych.monitor.sinks.queued import Metrics
from diptych.monitor.sinks.wandb import (
    Wandb,
    last_logged_step,
    lineage_of,
    public_config,
    send_release,
)
from tests.monitor.specs import make_spec

messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")

ROOT = Path(__file__).parents[3]
KEY = "0123456789abcdef0123456789abcdef01234567"
OBSERVE = ObserveSpec(
    sinks=("wandb",), wandb=WandbSpec(tags=("a-tag",)), alerts=AlertsSpec(wandb=True)
)


def read_records(path):
    """LevelDB's log: blocks of 32 KiB of (checksum, length, type) and data; one header before."""
    data = path.read_bytes()
    assert data[:4] in (b"", b":W&B")
    place, whole, records = 7, b"", []
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, place)
        piece = data[place + 7 : place + 7 + length]
        if len(piece) < length:
            break  # it is being written
        assert checksum == zlib.crc32(bytes([kind]) + piece)
        whole, place = whole + piece, place + 7 + length
        if kind in (1, 4):  # full, last
            record = messages.Record()
            record.ParseFromString(whole)
            records.append(record)
            whole = b""
    return records


def whole(path):
    """All records of a run that has ended; the last are written a moment after it says so."""
    until_s = time.monotonic() + 20
    while True:
        records = read_records(path)
        if any(record.HasField("exit") for record in records):
            return records
        assert time.monotonic() < until_s
        time.sleep(0.01)


def history(path):
    rows = []
    for record in whole(path):
        if record.HasField("history"):
            items = record.history.item
            keys = [item.key or "/".join(item.nested_key) for item in items]
            values = [json.loads(item.value_json) for item in items]
            rows.append(dict(zip(keys, values, strict=True)))
    return rows


def files_of(folder, spec):
    found = (folder / "wandb").glob(f"offline-run-*/run-{spec.run_id}.wandb")
    return sorted(found, key=lambda path: path.parent.name)


def log(folder, spec, steps, *, value=0.0, alerts=()):
    sink = Wandb(folder, spec=spec, lineage=lineage_of(spec))
    failed = []

    def run():
        try:
            sink.open()
            for step in steps:
                values = {"loss/total": value + step, "lr/llm": 0.5}
                sink.write(Metrics(step, time_s=1.0, values=values))
            for alert in alerts:
                sink.alert(alert)
            sink.close()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)  # as in a rank
    thread.start()
    thread.join()
    assert not failed, failed
    whole(files_of(folder, spec)[-1])


@pytest.fixture(autouse=True)
def _quiet_home(tmp_path, monkeypatch):
    for variable in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def test_an_offline_run_holds_each_step_once_over_two_attempts(tmp_path):
    spec, folder = make_spec(observe=OBSERVE), tmp_path / "run"
    folder.mkdir()
    assert last_logged_step(folder, run_id=spec.run_id) == -1
    alert = Alert(time_s=1.0, step=7, attempt=0, kind="nan", text="the loss is not finite")
    log(folder, spec, range(1, 8), alerts=[alert, alert.model_copy(update={"over": True})])
    assert last_logged_step(folder, run_id=spec.run_id) == 7
    # Resumed at a checkpoint after step 4: 5 to 7 are done again.
    log(folder, spec, range(5, 11), value=100.0)
    first, second = files_of(folder, spec)
    logged = {
        path: [(row["_step"], row["loss/total"]) for row in history(path)]
        for path in (first, second)
    }
    assert logged[first] == [(step, float(step)) for step in range(1, 8)]
    assert logged[second] == [(step, 100.0 + step) for step in range(8, 11)]
    assert last_logged_step(folder, run_id=spec.run_id) == 10
    alerts = [record.alert for record in whole(first) if record.HasField("alert")]
    assert [(each.title, each.text) for each in alerts] == [
        (f"{spec.run_id}: nan", "the loss is not finite")
    ]


def test_the_run_has_our_id_the_spec_and_the_lineage_and_no_secret(tmp_path):
    ray = RaySpec(runtime_env={"env_vars": {"HF_TOKEN": "hf_hidden"}})
    spec = make_spec(
        observe=OBSERVE,
        launch=LaunchSpec(ray=ray),
        shards="s3://someone:hidden@bucket/shards?signature=hidden",
    )
    folder = tmp_path / "run"
    folder.mkdir()
    log(folder, spec, [1])
    (path,) = files_of(folder, spec)
    (run,) = [record.run for record in whole(path) if record.HasField("run")]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (run.run_id, run.project, list(run.tags)) == (spec.run_id, "diptych", ["a-tag"])
    assert config["identity"]["optimizer"] == spec.identity.optimizer.model_dump(mode="json")
    assert config["placement"]["shards"] == "s3://bucket/shards?"
    assert config["lineage"] == {
        "run_id": spec.run_id,
        "identity_sha256": spec.identity.sha256,
        "manifest_sha256": "a" * 64,
        "processor_sha256": "b" * 64,
        "git_commit": "c0ffee",
        "git_dirty": False,
        "source_sha256": "s",
    }
    written = [each for each in folder.rglob("*") if each.is_file()]
    assert path in written
    for each in written:
        assert KEY.encode() not in each.read_bytes(), each
        assert b"hidden" not in each.read_bytes(), each


def test_the_end_of_a_long_file_is_enough_to_go_on(tmp_path):
    spec, folder = make_spec(observe=OBSERVE), tmp_path / "run"
    folder.mkdir()
    log(folder, spec, range(1, 1500))
    (path,) = files_of(folder, spec)
    assert path.stat().st_size > 9 * 32768
    assert last_logged_step(folder, run_id=spec.run_id) == 1499
    # A killed process leaves a part of a record.
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    kept = history_of_cut(path)
    assert last_logged_step(folder, run_id=spec.run_id) == kept


def history_of_cut(path):
    """The last step before the cut, by reading from the start."""
    data = path.read_bytes()
    place, whole, last = 7, b"", -1
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        piece = data[place + 7 : place + 7 + length]
        if len(piece) < length:
            break
        whole, place = whole + piece, place + 7 + length
        if kind in (1, 4):
            record = messages.Record()
            record.ParseFromString(whole)
            whole = b""
            if record.HasField("history"):
                last = record.history.step.num
    return last


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("api_key", "x", "(left out)"),
        ("HF_TOKEN", "x", "(left out)"),
        ("num_tokens", 5, 5),
        ("max_row_tokens", 5, 5),
        ("address", "https://user:pw@host/a", "https://host/a"),
        ("env_vars", {}, {}),
    ],
)
def test_values_under_names_of_secrets_are_left_out(key, value, shown):
    ray = RaySpec(runtime_env={key: value})
    config = public_config(make_spec(launch=LaunchSpec(ray=ray)))
    assert config["placement"]["launch"]["ray"]["runtime_env"] == {key: shown}


def test_a_release_is_logged_as_an_artifact_of_the_run(tmp_path):
    spec, folder, release = make_spec(observe=OBSERVE), tmp_path / "run", tmp_path / "release"
    for each in (folder, release):
        each.mkdir()
    (release / "model.safetensors").write_bytes(b"weights")
    log(folder, spec, [1, 2])
    send_release(folder, spec=spec, release=release, facts={"release_sha256": "d" * 64})
    _, path = files_of(folder, spec)
    records = whole(path)
    (artifact,) = [record.artifact for record in records if record.HasField("artifact")]
    assert (artifact.name, artifact.type) == (f"release-{spec.run_id}", "model")
    assert json.loads(artifact.metadata)["release_sha256"] == "d" * 64
    assert [entry.path for entry in artifact.manifest.contents] == ["model.safetensors"]
    assert last_logged_step(folder, run_id=spec.run_id) == 2


def test_monitor_alone_imports_neither_torch_nor_wandb():
    program = (
        "import sys, diptych.monitor.observing; "
        "print(sorted({'torch', 'wandb', 'tensorboardX'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert found.stdout == "[]\n"
