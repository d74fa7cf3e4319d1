"""A run's attempts, faults and decisions, as its folder's files tell them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diptych.core.records import Alert, AlertsSpec, Layout, Parent
from diptych.monitor.run_folder import RunFolder
from diptych.report.attempts import Attempt, how_ended, read_attempts, when
from diptych.report.decisions import Decision, list_decisions
from diptych.report.faults import Fault, list_faults, read_alerts, say_faults
from diptych.report.steps import Steps, read_steps

from .conftest import Finished
from .logs import BEGAN_S, rewrite


def _attempts(finished: Finished) -> list[Attempt]:
    folder = Path(finished.run.folder)
    return read_attempts(RunFolder(folder), run=finished.run, steps=read_steps(folder))


def _faults(finished: Finished, **changes: Any) -> list[Fault]:
    folder = Path(finished.run.folder)
    return list_faults(
        RunFolder(folder),
        run=finished.run.model_copy(update=changes),
        attempts=_attempts(finished),
        steps=read_steps(folder),
    )


def _decisions(finished: Finished, **changes: Any) -> list[Decision]:
    return list_decisions(
        changes.get("plan", finished.plan),
        run_spec=changes.get("run_spec", finished.run_spec),
        attempts=_attempts(finished),
        alerts=read_alerts(RunFolder(Path(finished.run.folder))),
    )


def _alert(**changes: Any) -> Alert:
    fields = {"time_s": BEGAN_S + 30, "step": 30, "attempt": 0, "kind": "disk", "text": "low"}
    return Alert.model_validate(fields | changes)


def _write_alerts(finished: Finished, *alerts: Alert) -> None:
    path = RunFolder(Path(finished.run.folder)).alerts
    path.write_text("".join(each.model_dump_json() + "\n" for each in alerts) + '{"cut', "utf-8")


def test_attempts_say_how_far_they_came_and_how_they_ended(finished: Finished) -> None:
    first, second = _attempts(finished)
    assert (first.from_step, first.last, first.num_steps) == (0, 80, 80)
    assert (second.from_step, second.last, second.num_steps) == (80, 120, 40)
    assert first.ended == "stopped on request, after a checkpoint"
    assert second.ended == "finished"
    # A step a second, 60 s between the attempts, and the step's own time is work.
    own_s = read_steps(Path(finished.run.folder)).records[80].step_s
    assert first.lost_s == pytest.approx(61 - own_s)
    assert second.lost_s is None
    assert when(first.started_s) == "2026-02-02 02:40:00"


def test_an_attempt_after_the_last_step_has_finished_the_run(finished: Finished) -> None:
    RunFolder(Path(finished.run.folder)).append_attempt({"started_s": 1.0, "from_step": 120})
    *_, last = _attempts(finished)
    assert (last.last, last.num_steps, last.ended) == (None, 0, "finished")


def test_an_attempt_that_nothing_is_known_of_is_listed(finished: Finished) -> None:
    RunFolder(Path(finished.run.folder)).attempts.unlink()
    first, _ = _attempts(finished)
    assert (first.started_s, first.from_step, first.ended) == (None, None, None)
    assert first.num_steps == 80


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"state": "stopped", "by": "signal"}, "by a signal"),
        ({"state": "running", "step": 4}, "without a word"),
        ({"state": "failed", "error": "RunError: no room"}, "failed: RunError: no room"),
        ({"state": "failed", "exit_code": 9}, "exit code 9"),
        ({}, None),
        (None, None),
    ],
)
def test_how_an_attempt_ended_is_what_was_said_last(said: Any, words: str | None) -> None:
    found = how_ended(said)
    assert found is None if words is None else words in str(found)


def test_an_ordinary_run_has_no_faults(finished: Finished) -> None:
    attempts = _attempts(finished)
    assert _faults(finished) == []
    said = say_faults(attempts, faults=[], run_spec=finished.run_spec)
    # 61 s less the first step's own, which is between 0.25 and 0.34 s.
    assert said.startswith("1 restart; 1 min 01 s passed between the steps before and after")
    assert said.endswith("nothing else went wrong.")
    alone = say_faults(attempts[:1], faults=[], run_spec=finished.run_spec)
    assert alone.startswith("None: one attempt")
    observe = finished.run_spec.placement.observe.model_copy(
        update={"alerts": AlertsSpec(kinds=())}
    )
    placement = finished.run_spec.placement.model_copy(update={"observe": observe})
    spec = finished.run_spec.model_copy(update={"placement": placement})
    assert say_faults(attempts[:1], faults=[], run_spec=spec).endswith("Alerts were turned off.")


def test_skipped_steps_in_a_row_are_one_fault(finished: Finished) -> None:
    folder = Path(finished.run.folder)
    records = list(read_steps(folder).records)
    for number in (4, 5, 6, 20):
        changes = {"skipped": True, "nonfinite": "rank 1: the loss" if number == 20 else None}
        records[number] = records[number].model_copy(update=changes)
    text = "".join(record.model_dump_json() + "\n" for record in records)
    RunFolder(folder).steps.write_text(text, encoding="utf-8")
    assert [(fault.kind, fault.step, fault.text) for fault in _faults(finished)] == [
        ("skipped step", 5, "steps 5 to 7 changed nothing: the gradient was not finite"),
        ("skipped step", 21, "step 21 changed nothing: rank 1: the loss"),
    ]


def test_masked_samples_are_named_once(finished: Finished) -> None:
    folder = Path(finished.run.folder)
    lines = [{"step": 3, "key": f"mine/{number}"} for number in (*range(7), 0)]
    text = "".join(json.dumps(each) + "\n" for each in lines)
    (folder / "masked-1.jsonl").write_text(text + '{"step": 9, "k', encoding="utf-8")
    (fault,) = _faults(finished, num_masked=7)
    # A loader's step 3 is the fourth.
    assert (fault.step, fault.attempt) == (4, None)
    assert fault.text == ("could not be read: mine/0, mine/1, mine/2, mine/3, mine/4 and 2 more")
    (folder / "masked-1.jsonl").unlink()
    (lost,) = _faults(finished, num_masked=7)
    assert lost.text == "7 of them could not be read"


def test_saves_checkpoints_memory_and_alerts_are_faults(finished: Finished) -> None:
    folder = Path(finished.run.folder)
    rewrite(folder, num_failed_saves=1, num_alloc_retries=2)
    run_folder = RunFolder(folder)
    lines = [json.loads(line) for line in run_folder.attempts.read_text().splitlines()]
    lines[1]["passed_over"] = ["passed over step-00000080: cut; it is kept as damaged-00000080-1"]
    run_folder.attempts.write_text("".join(json.dumps(each) + "\n" for each in lines))
    _write_alerts(
        finished,
        _alert(),
        _alert(time_s=BEGAN_S + 40, step=40, over=True),
        _alert(time_s=BEGAN_S + 90, step=90, kind="stall", attempt=1),
    )
    found = _faults(finished)
    assert [(fault.kind, fault.step, fault.attempt) for fault in found] == [
        ("failed save", 1, 0),
        ("device memory full", 1, 0),
        ("alert: disk", 30, 0),
        ("damaged checkpoint", 80, 1),
        ("failed save", 81, 1),
        ("device memory full", 81, 1),
        ("alert: stall", 90, 1),
    ]
    assert found[2].text == "low (over at step 40)"
    assert found[6].text == "low (not over when the attempt ended)"
    said = say_faults(_attempts(finished), faults=found, run_spec=finished.run_spec)
    assert "failed save (2), device memory full (2), alert: disk, damaged checkpoint" in said


def test_decisions_are_in_order_with_who_and_why(finished: Finished) -> None:
    _write_alerts(finished, _alert(), _alert(time_s=BEGAN_S + 40, step=40, over=True))
    found = _decisions(finished)
    assert [each.by for each in found] == [
        "settings",
        "planner",
        "settings",
        "ranks",
        "monitor",
        "monitor",
        "launcher",
        "settings",
    ]
    asked, planned, saving, attention, given, over, resumed, changed = found
    assert asked.what == "asked for plan.layout.micro_batch 8"
    assert planned.what == "layout ddp, dp 2, micro-batch 8, fp32 on cpu"
    assert planned.why.startswith("first of 3 that can run (1 cannot), by the fewest rows")
    assert "next came fsdp2, shard 2" in planned.why
    assert saving.what.endswith("30 s apart at least; train.checkpoint_saving auto")
    assert (attention.what, attention.why) == ("attention by sdpa", "on a CPU")
    assert (given.what, given.step) == ("alert 'disk' was given", 30)
    assert over.what == "alert 'disk' is over"
    assert (resumed.what, resumed.step) == ("attempt 2 goes on from step 80", 80)
    assert resumed.why == "attempt 1: stopped on request, after a checkpoint"
    assert changed.what == "changed keep_checkpoints: 2 → 3"


def test_a_fork_and_another_layout_are_decisions(finished: Finished) -> None:
    parent = Parent(run_id="0123456789ab", step=7, sha256="f" * 64, keeps="weights")
    spec = finished.run_spec
    forked = spec.model_copy(
        update={
            "identity": spec.identity.model_copy(update={"parent": parent}),
            "placement": spec.placement.model_copy(update={"layout": Layout(micro_batch=4)}),
        }
    )
    whats = [each.what for each in _decisions(finished, run_spec=forked)]
    assert "began from step 7 of run 0123456789ab, with its weights alone" in whats
    assert "the run was trained with layout ddp, one process, micro-batch 4, fp32 on cpu" in whats


def test_what_was_asked_of_an_old_plan_is_not_known(finished: Finished) -> None:
    old = finished.plan.model_copy(update={"asked": None})
    assert "was not written down" in _decisions(finished, plan=old)[0].what
    free = finished.plan.model_copy(update={"asked": ()})
    assert _decisions(finished, plan=free)[0].what == "left the layout to the planner"


def test_a_run_without_records_has_a_plan_and_nothing_else(finished: Finished) -> None:
    folder = RunFolder(Path("absent"))
    attempts = read_attempts(folder, run=finished.run, steps=Steps(()))
    assert attempts == []
    assert "Nothing was written down" in say_faults(attempts, faults=[], run_spec=finished.run_spec)
    found = list_decisions(finished.plan, run_spec=finished.run_spec, attempts=[], alerts=[])
    assert [each.by for each in found] == ["settings", "planner", "settings"]
