"""In: a run's records, its examples and its data's costs. Out: `report` (HTML) and `summary`.

The page stands alone and everything that came from data is escaped, see `render.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from diptych.core.records import (
    Lineage,
    Manifest,
    NodeSample,
    Parity,
    Plan,
    Run,
    RunSpec,
    Scores,
    Summary,
)
from diptych.core.units import format_count, format_seconds
from diptych.monitor.run_folder import RunFolder
from diptych.monitor.samples import read_samples
from diptych.report import tables
from diptych.report.against import memory_curve, memory_rows, say_memory, say_time, time_row
from diptych.report.attempts import read_attempts, when
from diptych.report.bounds import explain_speed
from diptych.report.contents import list_contents
from diptych.report.decisions import list_decisions
from diptych.report.faults import list_faults, read_alerts, say_faults
from diptych.report.figures import (
    MAX_POINTS,
    curves,
    headline,
    loss_curve,
    score_bars,
    source_curves,
    vision_curve,
    waste_curves,
)
from diptych.report.phases import cut_from, phase_curves, phase_rows
from diptych.report.render import render_page
from diptych.report.steps import Steps, read_steps
from diptych.report.verdict import judge, level, percent, sentence, tiny

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

RUN_STARTED = "DIPTYCH_RUN_STARTED"
"""Environment variable: when the whole run began, in seconds since 1970."""


def summarise(
    run: Run, manifest: Manifest, parity: Parity, scores: Scores, release: Path
) -> Summary:
    """Collect the numbers that scripts read; what was not measured stays None."""
    exact = scores.exact_match.get("read")
    blind = scores.blind_exact_match.get("read")
    every, every_blind = scores.exact_match.get("all"), scores.blind_exact_match.get("all")
    return Summary(
        exact_match=every.value if every else None,
        exact_match_low=every.low if every else None,
        exact_match_high=every.high if every else None,
        blind_exact_match=every_blind.value if every_blind else None,
        read_exact_match=exact.value if exact else None,
        read_exact_match_low=exact.low if exact else None,
        read_exact_match_high=exact.high if exact else None,
        blind_read_exact_match=blind.value if blind else None,
        parity_max_abs=parity.max_abs,
        num_steps=run.num_steps,
        final_loss=run.final_loss,
        run_s=_run_s(run),
        release=release.as_posix(),
        manifest_sha256=manifest.sha256,
        run_id=run.run_id,
    )


def draw(
    summary: Summary,
    lineage: Lineage,
    plan: Plan,
    scores: Scores,
    examples: pa.Table,
    manifest: Manifest,
    sample_costs: Path,
    data_section: str,
) -> str:
    """Draw the page.

    Args:
        summary: the numbers at the top.
        lineage: the run, its run_spec and parity, and whether the chain holds.
        plan: the layouts that were considered.
        scores: exact match with intervals, with and without images.
        examples: a few answers with their images.
        manifest: the shards.
        sample_costs: the folder of every sample's lengths.
        data_section: sources, samples and refused rows, drawn before training.

    Returns:
        One HTML document.
    """
    run, run_spec = lineage.run, lineage.run_spec
    folder = RunFolder(Path(run.folder))
    steps = read_steps(folder.path)
    samples = read_samples(folder.samples, since_s=0.0)
    buckets = run_spec.identity.buckets
    splits, counts = tables.cost_rows(manifest, sample_costs=sample_costs, buckets=buckets)
    findings = judge(lineage, scores=scores, manifest=manifest, steps=steps)
    planned = _planned(plan, run_spec=run_spec, steps=steps, samples=samples)
    story = _story(folder, plan=plan, lineage=lineage, steps=steps)
    phases = phase_rows(steps)
    figures = {
        **_curves(steps, run_spec=run_spec, sources=manifest.sources),
        "phases": phase_curves(steps),
        "memory": planned.pop("memory_figure"),
        "scores": score_bars(scores),
    }
    context: dict[str, Any] = {
        "level": level(findings),
        "sentence": sentence(summary, lineage=lineage, scores=scores, manifest=manifest),
        "findings": findings,
        "tiles": _tiles(summary, lineage=lineage, scores=scores, steps=steps),
        "contents": list_contents(
            lineage,
            manifest=manifest,
            scores=scores,
            steps=steps,
            phases=phases,
            against=planned["memory"],
            story=(story["attempts"], story["faults"], story["decisions"]),
        ),
        "figures": {name: figure.to_json() for name, figure in figures.items()},
        "captions": _captions(steps),
        "phases": phases,
        "cut_from": cut_from(steps),
        "diagnosis": explain_speed(steps, samples=samples, run_spec=run_spec),
        **planned,
        "splits": splits,
        "data_section": data_section,
        **_scored(scores, examples=examples),
        "bucket_rows": tables.bucket_rows(scores, buckets=buckets, counts=counts),
        **story,
        "how": tables.how_rows(run_spec.placement.layout, run=run, steps=steps),
        "trains": folder.read_what_trains(),
        "started": when(folder.first_started_s()),
        "summary": summary,
        "lineage": lineage,
        "run": run,
        "run_spec": run_spec,
        "plan": plan,
        "manifest": manifest,
        "steps": steps,
        "max_points": MAX_POINTS,
    }
    return render_page("report.html", context=context)


def _scored(scores: Scores, *, examples: pa.Table) -> dict[str, Any]:
    """Collect scores, and examples of wrong and right answers."""
    shown = tables.example_rows(examples)
    return {
        "scores": scores,
        "score_rows": tables.score_rows(scores),
        "source_scores": sorted(scores.exact_match_by_source.items()),
        "wrong": [row for row in shown if not row["correct"]],
        "right": [row for row in shown if row["correct"]],
    }


def _story(folder: RunFolder, *, plan: Plan, lineage: Lineage, steps: Steps) -> dict[str, Any]:
    """Collect what happened to a run, and what was decided for it."""
    run, run_spec = lineage.run, lineage.run_spec
    attempts = read_attempts(folder, run=run, steps=steps)
    alerts = read_alerts(folder)
    faults = list_faults(folder, run=run, attempts=attempts, steps=steps)
    return {
        "attempts": attempts,
        "faults": faults,
        "faults_said": say_faults(attempts, faults=faults, run_spec=run_spec),
        "decisions": list_decisions(plan, run_spec=run_spec, attempts=attempts, alerts=alerts),
    }


def _curves(steps: Steps, *, run_spec: RunSpec, sources: Sequence[str]) -> dict[str, Figure]:
    """Draw what is of the loss, the gradients and the rate over steps."""
    return {
        "loss": loss_curve(steps),
        **curves(steps, max_grad_norm=run_spec.identity.optimizer.max_grad_norm),
        "vision_loss": vision_curve(steps),
        "source_loss": source_curves(steps, sources=sources),
        "waste": waste_curves(steps),
    }


def _planned(
    plan: Plan, *, run_spec: RunSpec, steps: Steps, samples: Sequence[NodeSample]
) -> dict[str, Any]:
    """Collect what the plan said, beside what was measured."""
    layout = run_spec.placement.layout
    prediction = tables.predicted(plan, layout=layout)
    able, refused = tables.plan_rows(plan)
    memory = memory_rows(prediction, layout=layout, steps=steps, samples=samples)
    step = time_row(prediction, steps=steps)
    is_refused = prediction is not None and prediction.refused is not None
    return {
        "able": able,
        "refused": refused,
        "predicted": prediction,
        "measured_step_s": step.measured,
        "memory": memory,
        "memory_figure": memory_curve(steps, layout=layout, rows=memory),
        "against": [*memory, step],
        "against_said": [say_memory(memory, refused=is_refused), say_time(step)],
    }


def _tiles(
    summary: Summary, *, lineage: Lineage, scores: Scores, steps: Steps
) -> list[tuple[str, str | None, str]]:
    """Return name, number and remark of each key number; None was not measured."""
    run, parity = lineage.run, lineage.parity
    kind = headline(scores)
    exact = scores.exact_match.get(kind or "")
    blind = scores.blind_exact_match.get(kind or "")
    heldout = run.final_heldout_loss
    speed, step_s = steps.median("tokens_per_s"), steps.median("step_s")
    return [
        (
            f"exact match, '{kind}'" if kind else "exact match",
            percent(exact.value) if exact else None,
            f"{percent(exact.low)} to {percent(exact.high)}, {exact.n:,} questions"
            if exact
            else "",
        ),
        (
            "without the images",
            percent(blind.value) if blind else None,
            f"{percent(blind.low)} to {percent(blind.high)}" if blind else "",
        ),
        (
            "largest logit difference",
            tiny(parity.max_abs),
            f"of {format_count(parity.num_logits)} logits; {tiny(parity.tolerance)} allowed",
        ),
        (
            "whole run",
            None if summary.run_s is None else format_seconds(summary.run_s),
            f"training {format_seconds(run.train_s)}",
        ),
        (
            "loss, held out",
            None if heldout is None else f"{heldout:.3f}",
            f"training {_number(run.final_loss, spec='.3f')}",
        ),
        (
            "steps",
            f"{run.num_steps:,}",
            f"of {lineage.run_spec.identity.schedule.global_batch:,} rows each",
        ),
        (
            "step time, median",
            None if step_s is None else f"{step_s:.3f} s",
            "" if speed is None else f"{format_count(speed)} tokens/s",
        ),
        (
            "parameters",
            format_count(lineage.num_parameters),
            f"on {run.world_size} rank{'s' if run.world_size > 1 else ''}",
        ),
    ]


def _number(value: float | None, *, spec: str) -> str:
    return "not measured" if value is None else format(value, spec)


def _captions(steps: Steps) -> dict[str, str]:
    """Describe every curve in words, for those who do not see it."""
    described = {}
    for name, column, unit in (
        ("loss", "loss", ""),
        ("vision_loss", "vision_loss", ""),
        ("lr", "lr", ""),
        ("grad_norm", "grad_norm", ""),
        ("speed", "tokens_per_s", " tokens per second"),
        ("time", "step_s", " s"),
        ("waste", "padding_fraction", ", as padding"),
    ):
        values = steps.column(column)
        described[name] = (
            f"from {values[0]:.3g} to {values[-1]:.3g}{unit} over {len(values):,} logged steps"
            if len(values)
            else "not measured"
        )
    return described


def _run_s(run: Run) -> float | None:
    """Return the whole run's seconds so far; None if the training began in an earlier one."""
    started = float(os.environ.get(RUN_STARTED) or "inf")
    trained = RunFolder(Path(run.folder)).first_started_s()
    if trained is None or trained < started:
        return None
    return round(time.time() - started, 3)
