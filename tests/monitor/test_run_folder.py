from __future__ import annotations

from diptych.core.records import StepRecord
from diptych.monitor.run_folder import RunFolder, StepLog, StepTail


def _record(step, **facts):
    numbers = {
        "epoch": 0,
        "loss": 1.0 / step,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "num_samples": 4,
        "num_rows": 8,
        "num_label_tokens": 16,
        "num_text_tokens": 100,
        "num_image_tokens": 20,
        "num_patches": 80,
        "padding_fraction": 0.1,
        "step_s": 0.1,
        "data_s": 0.01,
        "tokens_per_s": 1200.0,
    }
    return StepRecord(step=step, **{**numbers, **facts})


def test_the_log_comes_back_as_it_was_written(tmp_path):
    folder = RunFolder(tmp_path)
    log = StepLog(folder.steps)
    written = [_record(1), _record(2, heldout_loss=0.5), _record(3, loss=None, skipped=True)]
    for record in written:
        log.write(record)
    log.close()
    assert folder.read_steps() == written


def test_attempts_come_back_but_for_a_line_that_was_cut_off(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.read_attempts() == []
    for step in (0, 4):
        folder.append_attempt({"from_step": step})
    with folder.attempts.open("a") as file:
        file.write('{"attempt": 2, "from')
    assert folder.read_attempts() == [
        {"attempt": 0, "from_step": 0},
        {"attempt": 1, "from_step": 4},
    ]


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    folder = RunFolder(tmp_path)
    folder.steps.write_text(_record(1).model_dump_json() + "\n" + _record(2).model_dump_json()[:20])
    assert [record.step for record in folder.read_steps()] == [1]


def test_steps_that_will_be_done_again_are_dropped(tmp_path):
    folder = RunFolder(tmp_path)
    folder.steps.write_text("".join(_record(n).model_dump_json() + "\n" for n in (1, 2, 3, 4)))
    folder.cut_steps(2)
    assert [record.step for record in folder.read_steps()] == [1, 2]


def test_the_tail_follows_a_growing_log_and_a_cut_one(tmp_path):
    folder = RunFolder(tmp_path)
    tail = StepTail(folder.steps)
    assert tail.read() == []
    log = StepLog(folder.steps)
    log.write(_record(1))
    log.write(_record(2))
    assert [record.step for record in tail.read()] == [1, 2]
    assert tail.read() == []
    with folder.steps.open("a") as file:
        file.write(_record(3).model_dump_json()[:10])
    assert tail.read() == []
    log.close()
    folder.cut_steps(1)
    log = StepLog(folder.steps)
    log.write(_record(2))
    log.close()
    assert [record.step for record in tail.read()] == [1, 2]


def test_an_attempt_takes_the_place_of_a_line_that_was_cut_off(tmp_path):
    """Written behind it, both would be lost, and every later reader would fail."""
    folder = RunFolder(tmp_path)
    folder.append_attempt({"from_step": 0})
    with folder.attempts.open("a") as file:
        file.write('{"attempt": 1, "from')
    assert folder.count_attempts() == 1
    assert folder.append_attempt({"from_step": 4}) == 1
    assert folder.read_attempts() == [
        {"attempt": 0, "from_step": 0},
        {"attempt": 1, "from_step": 4},
    ]


def test_attempts_are_numbered(tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert [folder.append_attempt({"x": 1}), folder.append_attempt({})] == [0, 1]


def test_status_is_empty_before_anyone_spoke(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.read_status() == {}
    folder.write_status("running", step=3)
    assert folder.read_status()["step"] == 3


def test_how_ranks_ended_is_kept_by_the_start_after_them(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.read_ending() == {}
    folder.write_status("stopped", step=3, by="request")
    for _ in range(2):
        # The second start comes after one that no rank has answered.
        folder.write_status("starting", num_steps=9, former=folder.read_ending())
        assert (folder.read_ending()["state"], folder.read_ending()["by"]) == ("stopped", "request")
    folder.write_status("running", step=3)
    assert folder.read_ending()["state"] == "running"


def test_the_newest_checkpoint_is_a_complete_one(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.newest_checkpoint() == 0
    for step, complete in ((5, True), (20, True), (30, False)):
        checkpoint = folder.checkpoints / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        if complete:
            (checkpoint / "checksums.json").write_text("{}")
    assert folder.newest_checkpoint() == 20


def test_a_run_has_started_when_its_first_attempt_did(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.first_started_s() is None
    folder.append_attempt({"started_s": 12.5})
    folder.append_attempt({"started_s": 99.0})
    assert folder.first_started_s() == 12.5
