"""In: a run's folder, its attempts and its steps. Out: what went wrong, as far as records hold it.

What nobody watched for is named, so that an empty list says no more than it knows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from pydantic import ValidationError

from diptych.core.records import Alert, Run, RunSpec
from diptych.core.units import format_seconds
from diptych.monitor.run_folder import RunFolder
from diptych.report.attempts import Attempt
from diptych.report.steps import Steps

_MOST_NAMED = 5


@dataclass(frozen=True)
class Fault:
    """One thing that went wrong.

    Attributes:
        kind: in a word or two.
        step: at which it was noticed; None where it has none.
        attempt: in which one; None where that was not written down.
        text: what happened.
    """

    kind: str
    step: int | None
    attempt: int | None
    text: str


def list_faults(
    folder: RunFolder, *, run: Run, attempts: Sequence[Attempt], steps: Steps
) -> list[Fault]:
    """List what went wrong during a run, by step; restarts are in its attempts."""
    found = [
        *_skipped(steps),
        *_masked(folder.path, num_masked=run.num_masked),
        *_failed_saves(steps),
        *_put_aside(attempts),
        *_retries(steps),
        *_alerts(read_alerts(folder)),
    ]
    return sorted(found, key=lambda fault: (fault.step is None, fault.step or 0))


def read_alerts(folder: RunFolder) -> list[Alert]:
    """Read the alerts of a run, in order; lines that are cut off or damaged are left out."""
    found = []
    if folder.alerts.is_file():
        for line in folder.alerts.read_bytes().splitlines():
            with suppress(ValidationError):
                found.append(Alert.model_validate_json(line))
    return found


def say_faults(attempts: Sequence[Attempt], *, faults: Sequence[Fault], run_spec: RunSpec) -> str:
    """Say in a sentence how smoothly a run went.

    Args:
        attempts: of the run.
        faults: what went wrong.
        run_spec: says which alerts would have been given.
    """
    num_restarts = max(0, len(attempts) - 1)
    unwatched = "" if run_spec.placement.observe.alerts.kinds else " Alerts were turned off."
    if not attempts:
        return f"Nothing was written down of its attempts.{unwatched}"
    if not num_restarts and not faults:
        return (
            "None: one attempt from the first step to the last, no step skipped, no sample "
            f"masked, no save failed, no checkpoint damaged, no alert.{unwatched}"
        )
    said = "No restart" if not num_restarts else f"{num_restarts:,} restart"
    said += "s" if num_restarts > 1 else ""
    lost = [attempt.lost_s for attempt in attempts if attempt.lost_s is not None]
    if lost:
        said += f"; {format_seconds(sum(lost))} passed between the steps before and after"
    kinds = Counter(fault.kind for fault in faults)
    others = [f"{kind} ({number})" if number > 1 else kind for kind, number in kinds.items()]
    rest = f"beside that: {', '.join(others)}" if others else "nothing else went wrong"
    return f"{said}; {rest}.{unwatched}"


def _skipped(steps: Steps) -> Iterator[Fault]:
    """Name the steps that changed no weight; those in a row, for the same reason, are one."""
    skipped = [record for record in steps.records if record.skipped]
    runs = groupby(
        enumerate(skipped),
        key=lambda item: (item[1].step - item[0], item[1].attempt, item[1].nonfinite),
    )
    for (_, attempt, nonfinite), group in runs:
        records = [record for _, record in group]
        first, last = records[0].step, records[-1].step
        which = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        why = nonfinite or "the gradient was not finite"
        if records[0].loss_scale is not None and records[0].loss is not None and not nonfinite:
            why = f"the gradient was not finite at a loss scale of {records[0].loss_scale:g}"
        yield Fault("skipped step", first, attempt, f"{which} changed nothing: {why}")


def _masked(run_folder: Path, *, num_masked: int) -> Iterator[Fault]:
    """Name samples that could not be read, by the step that they were masked in."""
    by_step = _read_masked(run_folder)
    steps = sorted(by_step)
    for step in steps[:_MOST_NAMED]:
        keys = sorted(by_step[step])
        more = f" and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
        text = f"could not be read: {', '.join(keys[:_MOST_NAMED])}{more}"
        yield Fault("masked sample", step, None, text)
    num_left = sum(len(by_step[step]) for step in steps[_MOST_NAMED:])
    if not steps:
        num_left = num_masked
    if num_left:
        further = "further ones" if steps else "of them"
        yield Fault("masked sample", None, None, f"{num_left:,} {further} could not be read")


def _read_masked(run_folder: Path) -> dict[int, set[str]]:
    """Read the keys of masked samples by the step, counted from 1; a step may be done twice."""
    found: dict[int, set[str]] = {}
    for path in run_folder.glob("masked-*.jsonl"):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                # Loaders count steps from 0. What a parent masked, it did before the step.
                step = int(entry["step"]) + (path.stem != "masked-parent")
                found.setdefault(step, set()).add(str(entry["key"]))
    return found


def _failed_saves(steps: Steps) -> Iterator[Fault]:
    """Name the steps in whose records the count of an attempt's failed saves has grown."""
    before: dict[int, int] = {}
    for record in steps.records:
        number = record.num_failed_saves - before.get(record.attempt, 0)
        before[record.attempt] = record.num_failed_saves
        if number > 0:
            text = "a checkpoint could not be written; the earlier ones stayed"
            yield Fault("failed save", record.step, record.attempt, text)


def _put_aside(attempts: Sequence[Attempt]) -> Iterator[Fault]:
    for attempt in attempts:
        for line in attempt.facts.get("passed_over", []):
            yield Fault("damaged checkpoint", attempt.from_step, attempt.number, str(line))


def _retries(steps: Steps) -> Iterator[Fault]:
    """Say how often a device's memory was so full that its allocator had to try again."""
    most: dict[int, tuple[int, int]] = {}
    for record in steps.records:
        number = record.num_alloc_retries or 0
        if number > most.get(record.attempt, (0, 0))[0]:
            most[record.attempt] = (number, record.step)
    for attempt, (number, step) in most.items():
        text = f"the device's allocator had to free its cache {number:,} times, last here"
        yield Fault("device memory full", step, attempt, text)


def _alerts(alerts: Sequence[Alert]) -> Iterator[Fault]:
    """Put each alert together with the word that it was over."""
    over = [alert for alert in alerts if alert.over]
    for alert in alerts:
        if alert.over:
            continue
        ends = [
            each.step
            for each in over
            if (each.kind, each.attempt) == (alert.kind, alert.attempt)
            and each.time_s >= alert.time_s
        ]
        told = f"over at step {ends[0]:,}" if ends else "not over when the attempt ended"
        yield Fault(f"alert: {alert.kind}", alert.step, alert.attempt, f"{alert.text} ({told})")
