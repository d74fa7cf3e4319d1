"""In: summary, lineage, scores and step log. Out: the verdict's sentence and what to look at.

A finding is `bad` where the result must not be trusted, `watch` where a person should look before
using it. No finding at all is a good run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from diptych.core.records import Interval, Lineage, Manifest, Run, Scores, Summary
from diptych.core.units import format_count, format_seconds
from diptych.report.figures import headline
from diptych.report.lineage import SOURCE_LINK
from diptych.report.steps import Steps

Level = Literal["good", "watch", "bad"]

MAX_WAITING = 0.10
"""Share of the step's time that may be spent waiting for data."""
MAX_QUARANTINED = 0.01
MAX_SEARCHING = 0.05
"""Share of the steps in which fp16's loss scale may still have been searched for."""
OVERFIT = 1.10
"""The last held-out loss over the lowest one, above which training went on for too long."""


@dataclass(frozen=True)
class Finding:
    """One thing to look at, in a sentence."""

    level: Level
    text: str


def judge(
    lineage: Lineage, *, scores: Scores, manifest: Manifest, steps: Steps
) -> tuple[Finding, ...]:
    """Return everything that speaks against the run, worst first."""
    findings = [
        *_judge_proof(lineage),
        *_judge_scores(scores),
        *_judge_run(lineage, manifest=manifest),
        *_judge_skipped(lineage.run, steps=steps),
        *_judge_saves(steps),
        *_judge_steps(steps),
    ]
    return tuple(sorted(findings, key=lambda finding: finding.level != "bad"))


def level(findings: tuple[Finding, ...]) -> Level:
    """Return the worst level of all findings."""
    if any(finding.level == "bad" for finding in findings):
        return "bad"
    return "watch" if findings else "good"


def sentence(summary: Summary, *, lineage: Lineage, scores: Scores, manifest: Manifest) -> str:
    """Say in a few words what was trained, how well it answers, and whether that is proven."""
    spec = lineage.run_spec.identity.model
    trained = (
        f"A {spec.family} of {format_count(lineage.num_parameters)} parameters, trained for "
        f"{lineage.run.num_steps:,} steps on {manifest.num_samples('train'):,} samples"
    )
    kind = headline(scores)
    exact = scores.exact_match.get(kind or "")
    if exact is None:
        answers = "was not scored"
    else:
        questions = "held-out questions" if kind == "all" else f"held-out '{kind}' questions"
        blind = scores.blind_exact_match.get(kind or "")
        without = f", {percent(blind.value)} without the images" if blind else ""
        answers = (
            f"answers {percent(exact.value)} of {exact.n:,} {questions} exactly "
            f"(95% interval {percent(exact.low)} to {percent(exact.high)}{without})"
        )
    parity = lineage.parity
    if not parity.passed:
        proof = f"the release does not compute what was trained (off by {tiny(parity.max_abs)})"
    elif parity.max_abs:
        proof = f"the release computes what was trained, to {tiny(parity.max_abs)}"
    else:
        proof = "the release computes exactly what was trained"
    time = f"; the whole run took {format_seconds(summary.run_s)}" if summary.run_s else ""
    return f"{trained}, {answers}; {proof}{time}."


def tiny(value: float) -> str:
    """Write a small number as '2.9e-6'."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}" if value else "0"


def percent(fraction: float) -> str:
    """Write a fraction as '96.3%'."""
    return f"{100 * fraction:.1f}%"


def _judge_proof(lineage: Lineage) -> list[Finding]:
    parity = lineage.parity
    findings = []
    if not parity.passed:
        findings.append(
            Finding(
                "bad",
                f"The release's logits differ from the trained model's by up to "
                f"{tiny(parity.max_abs)}; {tiny(parity.tolerance)} is allowed.",
            )
        )
    if parity.missing_keys or parity.extra_keys:
        findings.append(
            Finding(
                "bad",
                f"The release lacks {len(parity.missing_keys)} weights and has "
                f"{len(parity.extra_keys)} that were not trained.",
            )
        )
    findings += [
        Finding(
            "watch" if link.name == SOURCE_LINK else "bad",
            f"The lineage is broken: not {link.name}.",
        )
        for link in lineage.links
        if not link.holds
    ]
    return findings


def _judge_scores(scores: Scores) -> list[Finding]:
    kind = headline(scores)
    exact = scores.exact_match.get(kind or "")
    blind = scores.blind_exact_match.get(kind or "")
    if exact is None:
        return [Finding("bad", "No question was scored.")]
    if blind is None:
        return [Finding("watch", "The blind baseline was not measured.")]
    return _compare(exact, blind=blind)


def _compare(exact: Interval, *, blind: Interval) -> list[Finding]:
    if exact.value <= blind.value:
        return [Finding("bad", "The model answers no better with the images than without them.")]
    if exact.low <= blind.high:
        return [
            Finding("watch", "The intervals with and without the images overlap: score more of it.")
        ]
    return []


def _judge_run(lineage: Lineage, *, manifest: Manifest) -> list[Finding]:
    run, identity = lineage.run, lineage.run_spec.identity
    findings = []
    if run.num_steps < identity.num_steps:
        findings.append(
            Finding("bad", f"Stopped after {run.num_steps:,} of {identity.num_steps:,} steps.")
        )
    if run.num_masked:
        findings.append(
            Finding("watch", f"{run.num_masked:,} samples could not be read and were masked.")
        )
    total = sum(shard.num_samples for shard in manifest.shards) + manifest.num_quarantined
    if total and manifest.num_quarantined / total > MAX_QUARANTINED:
        share = percent(manifest.num_quarantined / total)
        findings.append(Finding("watch", f"{share} of the samples were quarantined."))
    return findings


def _judge_skipped(run: Run, *, steps: Steps) -> list[Finding]:
    """Tell steps in which fp16's loss scale was searched for from those that went wrong."""
    num_searching = sum(
        record.skipped and record.loss_scale is not None and record.loss is not None
        for record in steps.records
    )
    findings = []
    if num_wrong := run.num_skipped - num_searching:
        findings.append(
            Finding("watch", f"{num_wrong:,} steps changed nothing: their gradient was not finite.")
        )
    if num_searching > MAX_SEARCHING * run.num_steps:
        findings.append(
            Finding(
                "watch",
                f"{num_searching:,} of {run.num_steps:,} steps changed nothing: the loss scale was "
                "too large; begin with a smaller one, or take bf16.",
            )
        )
    return findings


def _judge_saves(steps: Steps) -> list[Finding]:
    """Count saves that failed; an attempt counts from its own beginning."""
    failed: dict[int, int] = {}
    for record in steps.records:
        failed[record.attempt] = max(failed.get(record.attempt, 0), record.num_failed_saves)
    num_failed = sum(failed.values())
    if not num_failed:
        return []
    return [
        Finding(
            "watch",
            f"{num_failed:,} checkpoints could not be written; the ranks' logs say why.",
        )
    ]


def _judge_steps(steps: Steps) -> list[Finding]:
    if not steps.records:
        return [Finding("watch", "The step log is empty: no curve was measured.")]
    findings = []
    heldout = steps.column("heldout_loss")
    heldout = heldout[np.isfinite(heldout)]
    if len(heldout) > 1 and heldout[-1] > OVERFIT * heldout.min():
        findings.append(
            Finding(
                "watch",
                f"Held-out loss ended at {heldout[-1]:.3f} after a low of {heldout.min():.3f}: "
                "fewer steps or more data would serve better.",
            )
        )
    waiting = steps.column("data_s").sum() / max(steps.column("step_s").sum(), 1e-9)
    if waiting > MAX_WAITING:
        findings.append(
            Finding("watch", f"{percent(waiting)} of the training time was spent on data.")
        )
    return findings
