"""In: plan, run_spec, attempts and alerts. Out: what was decided, by whom and why, in order.

Only what records hold: a decision that left no trace is not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diptych.core.records import Alert, Plan, RunSpec
from diptych.plan.search import ORDER
from diptych.report.attempts import Attempt
from diptych.report.tables import name_layout, plan_rows
from diptych.shape.attention import Choice

_SAVING = {
    "auto": "each save waits, or goes on beside training, whichever has lost less time so far",
    "async": "saves go on beside training",
    "sync": "training waits for every save",
}


@dataclass(frozen=True)
class Decision:
    """One thing that was decided.

    Attributes:
        by: whoever did: `settings` are a person's, all others decide by themselves.
        time_s: when, in seconds since 1970; None before the run began, or where it is not known.
        step: after which step; None before the first.
        what: was decided.
        why: as far as it was written down.
    """

    by: str
    time_s: float | None
    step: int | None
    what: str
    why: str


def list_decisions(
    plan: Plan, *, run_spec: RunSpec, attempts: Sequence[Attempt], alerts: Sequence[Alert]
) -> list[Decision]:
    """List what was decided: first for the run as a whole, then as it went on."""
    later = [
        *(each for attempt in attempts for each in _began(attempt, attempts=attempts)),
        *(_alerted(alert) for alert in alerts),
    ]
    later.sort(key=lambda each: (each.time_s is None, each.time_s or 0.0))
    return [
        *_asked(plan),
        *_planned(plan, run_spec=run_spec),
        *_forked(run_spec),
        _saving(run_spec),
        *later,
    ]


def _asked(plan: Plan) -> Iterator[Decision]:
    """Name the settings that narrowed the planner's choice."""
    if plan.asked is None:
        text = "what was asked of the planner was not written down"
        yield Decision("settings", None, None, text, "the plan is an older release's")
    elif plan.asked:
        text = f"asked for {', '.join(plan.asked)}"
        yield Decision("settings", None, None, text, "the planner keeps to it")
    else:
        yield Decision("settings", None, None, "left the layout to the planner", "")


def _planned(plan: Plan, *, run_spec: RunSpec) -> Iterator[Decision]:
    able, refused = plan_rows(plan)
    others = f"first of {len(able):,} that can run ({len(refused):,} cannot), by {ORDER}"
    if len(able) > 1:
        others += f"; next came {name_layout(able[1].layout)}"
    yield Decision("planner", None, None, f"layout {name_layout(plan.best)}", others)
    ran = run_spec.placement.layout
    if ran != plan.best:
        yield Decision(
            "launcher",
            None,
            None,
            f"the run was trained with layout {name_layout(ran)}",
            "it is not what this plan puts first: the run is from before this plan, or had "
            "another number of nodes",
        )


def _forked(run_spec: RunSpec) -> Iterator[Decision]:
    parent = run_spec.identity.parent
    if parent is not None:
        keeps = "its weights alone" if parent.keeps == "weights" else "everything in it"
        text = f"began from step {parent.step:,} of run {parent.run_id}, with {keeps}"
        yield Decision("settings", None, None, text, "train.fork_from")


def _saving(run_spec: RunSpec) -> Decision:
    placement = run_spec.placement
    every = f"a checkpoint every {placement.checkpoint_every_steps:,} steps"
    if placement.checkpoint_min_interval_s:
        every += f", {placement.checkpoint_min_interval_s:g} s apart at least"
    how = f"train.checkpoint_saving {placement.checkpoint_saving}"
    why = _SAVING[placement.checkpoint_saving]
    return Decision("settings", None, None, f"{every}; {how}", why)


def _began(attempt: Attempt, *, attempts: Sequence[Attempt]) -> Iterator[Decision]:
    """Say what was decided as an attempt began."""
    facts, at = attempt.facts, (attempt.started_s, attempt.from_step)
    before = attempts[attempts.index(attempt) - 1] if attempt != attempts[0] else None
    if before is not None:
        ended = before.ended or "how it ended was not written down"
        place = f"from step {attempt.from_step:,}" if attempt.from_step else "from the beginning"
        text = f"attempt {attempt.number + 1} goes on {place}"
        yield Decision("launcher", *at, text, f"attempt {before.number + 1}: {ended}")
        if changes := facts.get("changes"):
            # An arrow that no line break can cut.
            text = f"changed {'; '.join(map(str, changes))}".replace("->", "\N{RIGHTWARDS ARROW}")
            yield Decision("settings", *at, text, "the run's name does not depend on it")
        if _source(before) and _source(attempt) and _source(before) != _source(attempt):
            yield Decision("code", *at, "other source code than in the attempt before", "")
    for line in facts.get("passed_over", []):
        yield Decision("ranks", *at, str(line), "its files are not as they were written")
    chosen = facts.get("attention")
    if chosen and (before is None or chosen != before.facts.get("attention")):
        yield _attention(chosen, at=at)


def _attention(chosen: Mapping[str, Any], *, at: tuple[float | None, int | None]) -> Decision:
    choice = Choice(**chosen)
    others = "; ".join(f"not {kernel}: {why}" for kernel, why in choice.passed_over.items())
    why = f"{choice.why}; {others}" if others else choice.why
    return Decision("ranks", *at, f"attention by {choice.kernel}", why)


def _alerted(alert: Alert) -> Decision:
    what = f"alert '{alert.kind}' {'is over' if alert.over else 'was given'}"
    return Decision("monitor", alert.time_s, alert.step, what, alert.text)


def _source(attempt: Attempt) -> str | None:
    return attempt.facts.get("provenance", {}).get("source_sha256")
