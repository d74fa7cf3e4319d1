"""In: what the page shows of a run. Out: its contents, each section with its one number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.core.records import Lineage, Manifest, Scores
from diptych.core.units import format_bytes
from diptych.report.against import Against
from diptych.report.attempts import Attempt
from diptych.report.decisions import Decision
from diptych.report.faults import Fault
from diptych.report.figures import headline
from diptych.report.phases import PhaseRow
from diptych.report.steps import Steps
from diptych.report.verdict import percent


@dataclass(frozen=True)
class Entry:
    """One section: its anchor, its name, and what it says in a few words."""

    anchor: str
    name: str
    remark: str


def list_contents(
    lineage: Lineage,
    *,
    manifest: Manifest,
    scores: Scores,
    steps: Steps,
    phases: Sequence[PhaseRow],
    against: Sequence[Against],
    story: tuple[Sequence[Attempt], Sequence[Fault], Sequence[Decision]],
) -> list[Entry]:
    """List the sections in the page's order.

    Args:
        lineage: the run and its links.
        manifest: the data.
        scores: of the release.
        steps: that were logged.
        phases: where time went, the largest first.
        against: the memory that was measured beside the plan's; what is compared comes first.
        story: attempts, faults and decisions.
    """
    attempts, faults, decisions = story
    exact = scores.exact_match.get(headline(scores) or "")
    return [
        Entry("curves", "Curves", f"{len(steps.records):,} steps logged"),
        Entry("phases", "Phases", _say_phases(phases)),
        Entry("plan", "Memory against plan", _say_memory(against)),
        Entry("data", "Data", f"{manifest.num_samples('train'):,} samples to train on"),
        Entry("scores", "Scores", f"{percent(exact.value)} exact" if exact else "not scored"),
        Entry("examples", "Examples", "wrong ones first"),
        Entry("faults", "Faults and restarts", _say_faults(attempts, faults=faults)),
        Entry("decisions", "Decisions", f"{len(decisions)}, in order"),
        Entry("lineage", "Lineage", _say_links(lineage)),
    ]


def _say_phases(phases: Sequence[PhaseRow]) -> str:
    if not phases:
        return "not measured"
    return f"{percent(phases[0].share)} {phases[0].name}"


def _say_memory(against: Sequence[Against]) -> str:
    first = against[0]
    if first.measured is None:
        return "not measured"
    if first.difference is None:
        return f"{format_bytes(first.measured)}, not planned"
    way = "above" if first.difference > 0 else "below"
    return f"{format_bytes(first.measured)}, {abs(first.difference):.0%} {way}"


def _say_faults(attempts: Sequence[Attempt], *, faults: Sequence[Fault]) -> str:
    num_restarts = max(0, len(attempts) - 1)
    said = []
    if num_restarts:
        said.append(f"{num_restarts:,} restart{'s' if num_restarts > 1 else ''}")
    if faults:
        said.append(f"{len(faults):,} fault{'s' if len(faults) > 1 else ''}")
    return ", ".join(said) or "none"


def _say_links(lineage: Lineage) -> str:
    broken = sum(not link.holds for link in lineage.links)
    return f"{broken} broken" if broken else "every link holds"
