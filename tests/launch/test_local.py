from __future__ import annotations

from pathlib import Path

import pytest

from diptych.core.errors import ConfigError, DataError, RunError
from diptych.core.records import Layout, MemoryOptions
from diptych.launch import local
from diptych.launch.launch import launch
from diptych.launch.ready import alone, take_finished
from diptych.launch.words import last_words
from diptych.monitor.run_folder import RunFolder
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec

# The end of what torch elastic 2.14 prints, shortened.
SUMMARY = """\
Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 31515)
  error_file: <N/A>
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_17:54:05
  rank      : {rank} (local_rank: {rank})
  exitcode  : {ended}
  error_file: <N/A>
=======================================================
"""


def _logs(tmp_path, *, rank, ended, stderr=""):
    (tmp_path / "launcher.log").write_text(SUMMARY.format(rank=rank, ended=ended))
    folder = tmp_path / "id_x" / "attempt_0" / str(rank)
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_text(stderr)
    return tmp_path


def test_a_rank_that_was_killed_is_named_with_its_signal(tmp_path):
    logs = _logs(tmp_path, rank=1, ended="-9 (pid: 31514)  (SIGKILL)")
    assert last_words(logs) == "Rank 1 was killed by SIGKILL first."


def test_a_rank_that_raised_is_quoted(tmp_path):
    stderr = "noise\nTraceback (most recent call last):\n  File x\nFormatError: damaged\n"
    logs = _logs(tmp_path, rank=0, ended="1 (pid: 31514)", stderr=stderr)
    words = last_words(logs).splitlines()
    assert words == ["Rank 0 ended with exit code 1 first.", "File x", "FormatError: damaged"]


def test_a_launcher_without_a_summary_is_quoted_itself(tmp_path):
    (tmp_path / "launcher.log").write_text("run.py: error: no such option\n")
    assert last_words(tmp_path) == "run.py: error: no such option"


def _env(spec):
    return local.environment(spec, logs=Path("logs"))


@pytest.fixture
def spec(corpus):
    return make_spec(corpus, layout=Layout(), model=TINY_MODEL, schedule=TINY_SCHEDULE)


def test_a_run_that_is_being_trained_is_refused(tmp_path, spec, corpus):
    folder = RunFolder(tmp_path / spec.run_id)
    with alone(folder), pytest.raises(RunError, match="by another process"):
        launch(spec, corpus.sample_costs, corpus.shards, str(tmp_path))


@pytest.mark.parametrize(
    ("schedule", "layout", "message"),
    [
        ({"max_row_tokens": 9}, {}, "longer than a row of 9 tokens"),
        ({"weights": {"digit": 1.0}}, {}, "'digit', which is no source"),
        ({}, {"micro_batch": 3}, "3 rows splits groups of 4"),
    ],
)
def test_a_schedule_that_cannot_be_starts_no_rank(
    tmp_path, corpus, schedule, layout, message, monkeypatch
):
    monkeypatch.setattr(local.process, "start", lambda *_, **__: pytest.fail("ranks were started"))
    spec = make_spec(
        corpus,
        layout=Layout(**layout),
        model=TINY_MODEL,
        schedule=TINY_SCHEDULE.model_copy(update=schedule),
    )
    with pytest.raises((ConfigError, DataError), match=message):
        launch(spec, corpus.sample_costs, corpus.shards, str(tmp_path))


def test_a_finished_run_is_taken_or_moved_aside(tmp_path, spec, corpus):
    from diptych.core import provenance
    from diptych.core.records import Run

    folder = RunFolder(tmp_path / spec.run_id)
    checkpoint = folder.checkpoints / "step-00000006"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checksums.json").write_text("{}")
    run = Run(
        run_id=spec.run_id,
        identity_sha256=spec.identity.sha256,
        folder=str(folder.path),
        checkpoint=str(checkpoint),
        num_steps=6,
        final_loss=1.0,
        final_heldout_loss=None,
        train_s=1.0,
        num_attempts=1,
        world_size=1,
        num_masked=0,
        num_skipped=0,
        source_sha256=provenance.read().source_sha256,
    )
    folder.write_run(run)
    folder.write_spec(spec)
    assert launch(spec, corpus.sample_costs, corpus.shards, str(tmp_path)) == run
    # Without its last checkpoint it is not finished, and goes on from the one before.
    checkpoint.rename(checkpoint.with_name("gone"))
    assert take_finished(folder, spec=spec) is None
    assert folder.read_run() is None
    checkpoint.with_name("gone").rename(checkpoint)
    folder.write_run(run)
    other = spec.model_copy(
        update={"provenance": spec.provenance.model_copy(update={"source_sha256": "other"})}
    )
    assert take_finished(folder, spec=other) is None
    assert not folder.path.exists()
    assert (tmp_path / f"{spec.run_id}.old-1" / "run.json").is_file()


def test_the_environment_pins_one_thread_per_rank(spec, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert _env(spec)["OMP_NUM_THREADS"] == str(spec.placement.threads_per_rank) == "1"


def test_the_allocator_s_settings_reach_torch_under_both_its_names(spec):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    assert not any(name in _env(spec) for name in names)
    memory = MemoryOptions(allocator="max_split_size_mb:512")
    layout = spec.placement.layout.model_copy(update={"memory": memory})
    placement = spec.placement.model_copy(update={"layout": layout})
    env = _env(spec.model_copy(update={"placement": placement}))
    assert [env[name] for name in names] == ["max_split_size_mb:512"] * 2


def test_ranks_of_one_machine_talk_over_loopback_unless_told_otherwise(spec, monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    found = _env(spec)
    assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    found = _env(spec)
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("eth7", "lo")


def test_the_launcher_serves_no_store(spec, tmp_path):
    command = local.command(
        spec, folder=RunFolder(tmp_path), logs=tmp_path, meeting=tmp_path / "store"
    )
    assert "--rdzv-conf=store_type=file" in command
    assert f"--rdzv-endpoint={tmp_path / 'store'}" in command


def test_ranks_that_would_fail_again_are_not_started_again(tmp_path, corpus, capfd):
    """The only checkpoint is damaged: said at once, in the ranks' own words."""
    spec = make_spec(
        corpus, layout=Layout(micro_batch=4), model=TINY_MODEL, schedule=TINY_SCHEDULE, num_steps=2
    )
    spec = spec.model_copy(
        update={"placement": spec.placement.model_copy(update={"max_restarts": 3})}
    )
    launch(spec, corpus.sample_costs, corpus.shards, str(tmp_path))
    folder = RunFolder(tmp_path / spec.run_id)
    folder.finished.unlink()
    for checkpoint in folder.checkpoints.iterdir():
        with next(checkpoint.glob("shard-*")).open("r+b") as file:
            file.truncate(100)
    with pytest.raises(RunError, match="FormatError: No checkpoint of this run is sound") as caught:
        launch(spec, corpus.sample_costs, corpus.shards, str(tmp_path))
    assert "Traceback" not in str(caught.value)
    assert "goes on from" not in str(caught.value)
    log = folder.logs / "attempt-001" / "rank-00000.log"
    assert log.read_text().count("Traceback") == 1
    assert folder.count_attempts() == 1
