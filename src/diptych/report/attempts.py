"""In: a run's folder and its steps. Out: its attempts, each with when, how far, and how it ended.

How an attempt ended is what was last said of it, which the one after it has noted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from diptych.core.records import Run, StepRecord
from diptych.monitor.run_folder import RunFolder
from diptych.report.steps import Steps


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks; what nobody wrote down is None.

    Attributes:
        number: counted from 0.
        started_s: when it began, in seconds since 1970.
        from_step: how many steps were done then.
        last: the last of its steps that count: those that a later attempt did again do not.
        num_steps: how many count.
        ended: how it ended, in words.
        lost_s: between its last step that counts and the first of the next attempt; work that was
            done again is in it. None for the last attempt.
        facts: all that it noted when it began.
    """

    number: int
    started_s: float | None
    from_step: int | None
    last: int | None
    num_steps: int
    ended: str | None
    lost_s: float | None
    facts: Mapping[str, Any]


def read_attempts(folder: RunFolder, *, run: Run, steps: Steps) -> list[Attempt]:
    """List a run's attempts, as far as its step log or its attempts' notes know them."""
    noted = {int(each["attempt"]): each for each in folder.read_attempts()}
    done: dict[int, list[StepRecord]] = {}
    for record in steps.records:
        done.setdefault(record.attempt, []).append(record)
    numbers = sorted(noted.keys() | done.keys())
    attempts = []
    for number in numbers:
        facts, records = noted.get(number, {}), done.get(number, [])
        is_last = number == numbers[-1]
        attempts.append(
            Attempt(
                number=number,
                started_s=facts.get("started_s"),
                from_step=facts.get("from_step"),
                last=records[-1].step if records else None,
                num_steps=len(records),
                ended=_end_of_last(run, step=_reached(facts, records=records))
                if is_last
                else how_ended(noted.get(number + 1, {}).get("former")),
                lost_s=None if is_last else _lost_s(done, after=number),
                facts=facts,
            )
        )
    return attempts


def how_ended(said: Mapping[str, Any] | None) -> str | None:
    """Say how an attempt ended, from what was last said of it; None where nothing was."""
    state = (said or {}).get("state")
    if said is None or state is None:
        return None
    if state == "running":
        return "its ranks ended without a word: killed, or by an error that their logs have"
    if state == "stopped":
        by = {"request": "on request", "signal": "by a signal"}.get(said.get("by", ""))
        return f"stopped {by}, after a checkpoint" if by else "stopped"
    if state == "failed" and "error" in said:
        return f"failed: {said['error']}"
    if state == "failed" and "exit_code" in said:
        return f"its ranks failed with exit code {said['exit_code']}; their logs say why"
    return str(state)


def when(time_s: float | None) -> str | None:
    """Write a moment, in UTC, as '2026-02-03 14:05:06'; None where it is not known."""
    if time_s is None:
        return None
    return datetime.fromtimestamp(time_s, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")


def _reached(facts: Mapping[str, Any], *, records: Sequence[StepRecord]) -> int:
    """Return the step that an attempt came to; one that began after the last step stays there."""
    return records[-1].step if records else facts.get("from_step") or 0


def _end_of_last(run: Run, *, step: int) -> str | None:
    """Say how the last attempt ended, which nobody came after."""
    return "finished" if step >= run.num_steps else None


def _lost_s(done: Mapping[int, Sequence[StepRecord]], *, after: int) -> float | None:
    """Return the time between two attempts' steps that count, less the first step's own."""
    before, following = done.get(after), done.get(after + 1)
    if not before or not following:
        return None
    ended_s, next_s = before[-1].time_s, following[0].time_s
    if ended_s is None or next_s is None:
        return None
    return max(0.0, next_s - ended_s - following[0].step_s)
