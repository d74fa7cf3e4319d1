"""A proven release is attached to its run in wandb, for real; a failure is said, not raised."""

from __future__ import annotations

import json
import logging
import os

import pytest

from diptych.core.records import Attachment, ObserveSpec, Parity, Run, WandbSpec
from diptych.export import attach as attaching
from diptych.export.attach import attach
from tests.monitor.sinks.test_wandb import files_of, messages, whole
from tests.monitor.specs import make_spec

SHA = "d" * 64
WANTED = ObserveSpec(sinks=("wandb",), wandb=WandbSpec(artifacts=True))

assert messages  # the module is skipped without wandb


@pytest.fixture
def release(tmp_path):
    folder = tmp_path / "a release"
    (folder / "adapter").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "adapter" / "config.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    for variable in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(folder))
    for variable in ("WANDB_API_KEY", "WANDB_DATA_DIR"):
        monkeypatch.delenv(variable, raising=False)
    return folder


def finished(tmp_path, *, observe):
    spec, folder = make_spec(observe=observe), tmp_path / "run"
    folder.mkdir()
    (folder / "run_spec.json").write_text(spec.model_dump_json())
    run = Run(
        run_id=spec.run_id,
        identity_sha256=spec.identity.sha256,
        folder=str(folder),
        checkpoint=str(folder / "checkpoints"),
        num_steps=6,
        final_loss=None,
        final_heldout_loss=None,
        train_s=1.0,
        num_attempts=1,
        world_size=1,
        num_masked=0,
        num_skipped=0,
        source_sha256="s",
    )
    parity = Parity(
        release_sha256=SHA,
        run_id=spec.run_id,
        max_abs=0.25,
        max_rel=0.5,
        tolerance=1.0,
        num_samples=1,
        num_logits=1,
        missing_keys=(),
        extra_keys=(),
        tokens_equal=True,
        passed=True,
    )
    return spec, run, parity


def test_the_release_is_an_artifact_of_the_same_run_offline(tmp_path, release, home):
    spec, run, parity = finished(tmp_path, observe=WANTED)
    found = attach(release, run, parity)
    name = f"release-{spec.run_id}"
    assert found == Attachment(release_sha256=SHA, run_id=spec.run_id, artifact=name)
    (path,) = files_of(tmp_path / "run", spec)
    records = whole(path)
    assert [each.run.run_id for each in records if each.HasField("run")] == [spec.run_id]
    (artifact,) = [each.artifact for each in records if each.HasField("artifact")]
    assert (artifact.name, artifact.type) == (name, "model")
    facts = json.loads(artifact.metadata)
    assert (facts["release_sha256"], facts["parity_max_abs"]) == (SHA, 0.25)
    contents = {entry.path: entry.local_path for entry in artifact.manifest.contents}
    assert set(contents) == {"model.safetensors", "adapter/config.json"}
    # What is sent later is what was proven, whatever becomes of the release meanwhile.
    (release / "model.safetensors").write_bytes(b"others!")
    with open(contents["model.safetensors"], "rb") as file:
        assert file.read() == b"weights"
    assert os.path.commonpath([contents["model.safetensors"], run.folder]) == run.folder
    assert not [each for each in home.rglob("*.safetensors")]


@pytest.mark.parametrize(
    "observe",
    [
        ObserveSpec(wandb=WandbSpec(artifacts=True)),
        ObserveSpec(sinks=("wandb",)),
        ObserveSpec(sinks=("tensorboard",), wandb=WandbSpec(artifacts=True)),
    ],
)
def test_what_nobody_asked_for_is_not_sent(tmp_path, release, monkeypatch, observe):
    monkeypatch.setattr(attaching, "run_modules", lambda *_, **__: pytest.fail("it is sent"))
    spec, run, parity = finished(tmp_path, observe=observe)
    assert attach(release, run, parity) == Attachment(release_sha256=SHA, run_id=spec.run_id)


def put_in_place_of_wandb(tmp_path, monkeypatch, text):
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "wandb.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.parametrize(
    ("text", "limit_s", "why"),
    [
        ("raise ImportError('no wandb here')", 120.0, "ImportError: no wandb here"),
        ("import time; time.sleep(600)", 1.0, "send the release to wandb took longer than 1"),
    ],
    ids=["fails", "hangs"],
)
def test_a_release_is_whole_without_it(tmp_path, release, monkeypatch, caplog, text, limit_s, why):
    put_in_place_of_wandb(tmp_path, monkeypatch, text)
    monkeypatch.setattr(attaching, "_LEAST_S", limit_s)
    spec, run, parity = finished(tmp_path, observe=WANTED)
    with caplog.at_level(logging.WARNING):
        found = attach(release, run, parity)
    assert (found.artifact, found.release_sha256) == (None, SHA)
    assert why in (found.error or "")
    (said,) = caplog.messages
    for part in ("the release is whole", spec.run_id, why, "remove attachment.json"):
        assert part in said


def test_a_damaged_folder_of_the_run_is_said(tmp_path, release, caplog):
    _, run, parity = finished(tmp_path, observe=WANTED)
    (tmp_path / "run" / "run_spec.json").write_text("{")
    assert attach(release, run, parity).error
    assert "it is not attached" in caplog.text
