"""What speaks against a run turns its verdict; nothing else does."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from diptych.core.records import Interval, StepRecord
from diptych.report.lineage import trace
from diptych.report.steps import Steps, read_steps
from diptych.report.verdict import Finding, judge, level, percent, sentence, tiny

from .conftest import Finished


def findings(finished: Finished, *, steps: Steps | None = None) -> tuple[Finding, ...]:
    lineage = trace(
        finished.raw_samples,
        finished.manifest,
        finished.model_shape,
        finished.run_spec,
        finished.run,
        finished.parity,
        finished.scores,
    )
    steps = read_steps(Path(finished.run.folder)) if steps is None else steps
    return judge(lineage, scores=finished.scores, manifest=finished.manifest, steps=steps)


def test_a_good_run_has_no_finding(finished: Finished) -> None:
    assert findings(finished) == ()
    assert level(()) == "good"


@pytest.mark.parametrize(
    ("part", "update", "expected", "words"),
    [
        ("parity", {"passed": False, "max_abs": 0.25}, "bad", "2.5e-1; 1e-5 is allowed"),
        ("parity", {"missing_keys": ("a", "b")}, "bad", "lacks 2 weights"),
        ("parity", {"run_id": "another"}, "bad", "not released from this run"),
        ("scores", {"manifest_sha256": "0"}, "bad", "not scored on this data"),
        ("scores", {"release_sha256": "0"}, "bad", "not scored the release"),
        ("scores", {"exact_match": {}}, "bad", "No question"),
        ("scores", {"blind_exact_match": {}}, "watch", "blind baseline was not measured"),
        ("run", {"identity_sha256": "0"}, "bad", "not trained as this run_spec says"),
        ("run", {"source_sha256": "0"}, "watch", "not trained by the source code"),
        ("run", {"num_steps": 60}, "bad", "Stopped after 60 of 120"),
        ("run", {"num_masked": 3}, "watch", "3 samples could not be read"),
        ("run", {"num_skipped": 2}, "watch", "2 steps changed nothing"),
    ],
)
def test_findings(finished: Finished, part: str, update: dict, expected: str, words: str) -> None:
    changed = replace(finished, **{part: getattr(finished, part).model_copy(update=update)})
    found = findings(changed)
    assert level(found) == expected
    assert words in " ".join(finding.text for finding in found)


def test_much_quarantined_is_seen(finished: Finished) -> None:
    manifest = finished.manifest.model_copy(update={"quarantined": {"starter": {"too_small": 2}}})
    found = {
        finding.text: finding.level for finding in findings(replace(finished, manifest=manifest))
    }
    assert found["1.6% of the samples were quarantined."] == "watch"


@pytest.mark.parametrize(
    ("blind", "expected"),
    [
        (Interval(value=0.97, low=0.96, high=0.98, n=9), "bad"),
        (Interval(value=0.93, low=0.91, high=0.95, n=9), "watch"),
        (Interval(value=0.90, low=0.88, high=0.92, n=9), "good"),
    ],
)
def test_the_blind_baseline_decides(finished: Finished, blind: Interval, expected: str) -> None:
    scores = finished.scores.model_copy(update={"blind_exact_match": {"read": blind}})
    assert level(findings(replace(finished, scores=scores))) == expected


def test_waiting_and_overfitting_are_seen(finished: Finished) -> None:
    records = read_steps(Path(finished.run.folder)).records

    def changed(**update: float | None) -> tuple[StepRecord, ...]:
        return tuple(record.model_copy(update=update) for record in records)

    slow = findings(finished, steps=Steps(changed(step_s=0.1, data_s=0.02)))
    assert [finding.text[:5] for finding in slow] == ["20.0%"]
    rising = list(changed(heldout_loss=None))
    rising[50] = rising[50].model_copy(update={"heldout_loss": 0.2})
    rising[-1] = rising[-1].model_copy(update={"heldout_loss": 0.23})
    found = findings(finished, steps=Steps(tuple(rising)))
    assert "ended at 0.230 after a low of 0.200" in found[0].text


def test_worst_finding_comes_first(finished: Finished) -> None:
    run = finished.run.model_copy(update={"num_masked": 1})
    parity = finished.parity.model_copy(update={"passed": False})
    found = findings(replace(finished, run=run, parity=parity))
    assert [finding.level for finding in found] == ["bad", "watch"]


def test_sentence(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    from diptych.report.page import RUN_STARTED, summarise

    monkeypatch.delenv(RUN_STARTED, raising=False)
    lineage = trace(
        finished.raw_samples,
        finished.manifest,
        finished.model_shape,
        finished.run_spec,
        finished.run,
        finished.parity,
        finished.scores,
    )
    summary = summarise(
        finished.run, finished.manifest, finished.parity, finished.scores, finished.release
    )
    half = 1.96 * math.sqrt(0.963 * 0.037 / 420)
    assert sentence(
        summary, lineage=lineage, scores=finished.scores, manifest=finished.manifest
    ) == (
        "A qwen3_vl of 1.46 M parameters, trained for 120 steps on 96 samples, answers 96.3% of "
        f"420 held-out 'read' questions exactly (95% interval {percent(0.963 - half)} to "
        f"{percent(0.963 + half)}, 3.1% without the images); the release computes what was "
        "trained, to 2.9e-6."
    )


def test_tiny_numbers() -> None:
    assert [tiny(value) for value in (2.94e-6, 1e-5, 0.25, 3.0, 0.0)] == [
        "2.9e-6",
        "1e-5",
        "2.5e-1",
        "3e0",
        "0",
    ]


@pytest.mark.parametrize(
    ("num_searching", "expected", "words"),
    [(0, [], ""), (2, [], ""), (7, ["watch"], "7 of 120 steps changed nothing: the loss scale")],
)
def test_a_loss_scale_that_is_searched_for_is_no_fault(
    finished: Finished, num_searching: int, expected: list[str], words: str
) -> None:
    records = list(read_steps(Path(finished.run.folder)).records)
    for number in range(num_searching):
        update = {"skipped": True, "loss_scale": 65536.0}
        records[number] = records[number].model_copy(update=update)
    run = finished.run.model_copy(update={"num_skipped": num_searching})
    found = findings(replace(finished, run=run), steps=Steps(tuple(records)))
    assert [finding.level for finding in found] == expected
    assert words in " ".join(finding.text for finding in found)


def test_checkpoints_that_could_not_be_written_are_counted_over_attempts(
    finished: Finished,
) -> None:
    records = [
        record.model_copy(update={"attempt": int(number >= 60), "num_failed_saves": number // 50})
        for number, record in enumerate(read_steps(Path(finished.run.folder)).records)
    ]
    found = findings(finished, steps=Steps(tuple(records)))
    # One in the first attempt's 60 steps, two in the second's.
    assert [finding.level for finding in found] == ["watch"]
    assert "3 checkpoints could not be written" in found[0].text
