"""`kedro diagnose`: runs' folders in, findings for a terminal or for scripts out.

Everything that came from files is text here, never markup or escape codes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from diptych.core.errors import RunError
from diptych.core.records import Comparison, Diagnosis, Finding, RunRow
from diptych.core.terminal import plain
from diptych.launch.changes import differences
from diptych.monitor.diagnose.compare import compare
from diptych.monitor.diagnose.findings import percent
from diptych.monitor.observations import Observations, read_observations

_MOST_RANGES = 6
_CONFIDENCE = ((0.85, "sure"), (0.65, "likely"), (0.0, "perhaps"))


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """Read `100:200`; either side may be left out.

    Raises:
        RunError: it is no range of steps.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d*):(\d*)", text)
    if found is None or text == ":":
        raise RunError(f"--steps is '{text}'", allowed="Ranges are as in 100:200, 100: or :200")
    first, last = int(found[1] or 0), int(found[2] or 2**62)
    if first > last:
        raise RunError(f"--steps is '{text}', whose first step comes after its last")
    return first, last


def observe(row: RunRow) -> Observations:
    """Read what was observed of a run."""
    return read_observations(Path(row.folder), stage=row.stage)


def compare_runs(
    observed: Observations, *, against: Observations, steps: tuple[int, int] | None
) -> Comparison:
    """Compare a run with another, over the same steps of both."""
    return compare(
        observed.measure(steps=steps),
        against=against.measure(steps=steps),
        run_ids=(observed.run_id, against.run_id),
        num_ranks=(_num_ranks(observed), _num_ranks(against)),
        settings=setting_differences(observed, against=against),
    )


def setting_differences(observed: Observations, *, against: Observations) -> list[str]:
    """List what differs in identity and placement, from the other run to this one."""
    if observed.spec is None or against.spec is None:
        return []
    return [
        line
        for part in ("identity", "placement")
        for line in differences(
            getattr(against.spec, part).model_dump(mode="json"),
            getattr(observed.spec, part).model_dump(mode="json"),
        )
    ]


def to_json(diagnosis: Diagnosis, *, comparison: Comparison | None) -> str:
    """Write a diagnosis as JSON; with another run beside it, both under a name."""
    if comparison is None:
        return diagnosis.model_dump_json(indent=1)
    both = {"diagnosis": diagnosis, "comparison": comparison}
    return json.dumps({name: each.model_dump(mode="json") for name, each in both.items()}, indent=1)


def draw_diagnosis(diagnosis: Diagnosis) -> RenderableType:
    """Draw a diagnosis: the verdict, each finding with evidence and changes, what is missing."""
    style = "bold green" if diagnosis.healthy else "bold yellow"
    steps = f"steps {diagnosis.first_step} to {diagnosis.last_step}"
    parts: list[RenderableType] = [
        Text(f"run {diagnosis.run_id}  {steps}"),
        Text(plain(diagnosis.verdict), style=style),
    ]
    for number, finding in enumerate(diagnosis.findings, start=1):
        parts += _draw_finding(finding, number=number)
    if diagnosis.missing:
        parts.append(Text("\nnot measured, and so not judged", style="dim"))
        parts += [Text(f"  {plain(line)}", style="dim") for line in diagnosis.missing]
    return Group(*parts)


def draw_comparison(comparison: Comparison) -> RenderableType:
    """Draw a comparison: the verdict, parts of a step, settings that differ."""
    ranks = f"{comparison.num_ranks} ranks beside {comparison.against_num_ranks}"
    parts: list[RenderableType] = [
        Text(f"\nrun {comparison.run_id} against {comparison.against_id}, {ranks}"),
        Text(plain(comparison.verdict), style="bold"),
    ]
    if comparison.parts:
        parts.append(Padding(_parts_table(comparison), (0, 0, 0, 2)))
    if comparison.settings:
        parts.append(Text("settings that differ"))
        parts += [Text(f"  {plain(line)}") for line in comparison.settings]
    parts += [Text(f"  not measured: {plain(line)}", style="dim") for line in comparison.missing]
    return Group(*parts)


def _draw_finding(finding: Finding, *, number: int) -> list[RenderableType]:
    said = next(word for least, word in _CONFIDENCE if finding.confidence >= least)
    cost = "" if finding.cost is None else f"  {percent(finding.cost)} of the time"
    title = Text(f"\n{number}. {plain(finding.title)}", style="bold")
    title.append(f"  {finding.bound}{cost}  {said}", style="dim")
    lines: list[RenderableType] = [title]
    lines += [Text(f"   {plain(each)}") for each in finding.evidence]
    if finding.steps:
        lines.append(Text(f"   steps {_name_steps(finding.steps)}", style="dim"))
    if finding.changes:
        lines.append(Padding(_changes_table(finding), (0, 0, 0, 3)))
    return lines


def _changes_table(finding: Finding) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("change", "to", "saves", "why"):
        table.add_column(title, overflow="fold", no_wrap=title == "saves")
    for each in finding.changes:
        gain = "" if each.gain is None else f"up to {percent(each.gain)}"
        table.add_row(*(Text(plain(cell)) for cell in (each.setting, each.to, gain, each.why)))
    return table


def _parts_table(comparison: Comparison) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("part of a step", "expected", "taken", "of the speedup"):
        justify = "left" if title == "part of a step" else "right"
        table.add_column(title, justify=justify, no_wrap=True)
    for part in comparison.parts:
        cells = (
            part.name,
            f"{part.expected_s:.4g} s",
            f"{part.took_s:.4g} s",
            f"{-part.missing:+.2f}",
        )
        table.add_row(*map(Text, cells))
    cells = ("all", f"{sum(part.expected_s for part in comparison.parts):.4g} s")
    missing = sum(part.missing for part in comparison.parts)
    table.add_row(*map(Text, (*cells, f"{comparison.step_s:.4g} s", f"{-missing:+.2f}")))
    return table


def _name_steps(steps: tuple[tuple[int, int], ...]) -> str:
    named = [str(first) if first == last else f"{first}-{last}" for first, last in steps]
    more = f" and {len(named) - _MOST_RANGES} more" if len(named) > _MOST_RANGES else ""
    return ", ".join(named[:_MOST_RANGES]) + more


def _num_ranks(observed: Observations) -> int:
    return 1 if observed.spec is None else observed.spec.placement.layout.world_size
