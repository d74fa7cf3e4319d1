"""In: a run's step records. Out: the chart and the table of where its ranks' time went.

A rank is in one phase at any moment, so that the means over ranks add up to the time. Steps that
have no phases (an older release's), or were profiled, are left out of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from diptych.core.records import Phase, StepRecord
from diptych.monitor.diagnose.times import PHASES, phase, without_profiled
from diptych.report.figures import BLIND, HELDOUT, MAX_POINTS, MODEL, WAIT, blank
from diptych.report.steps import Steps, thin

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLORS: dict[Phase, str] = {
    "forward": "#7fb0f0",
    "backward": MODEL,
    "update": "#2f9e77",
    "communication": WAIT,
    "data": HELDOUT,
    "place": "#b0932c",
    "checkpoint": "#8a6fd1",
    "heldout": "#4aa3b8",
    "other": BLIND,
}
"""The order is that of the chart, from below; what computes lies lowest."""

_TALLEST = 3.0
"""Times the median that the axis of the chart reaches, where single steps are taller."""


@dataclass(frozen=True)
class PhaseRow:
    """One phase over all steps that measured it; seconds are means of a step.

    Attributes:
        name: the phase.
        share: of the ranks' mean time.
        least_s: of the rank that had least in each step.
        mean_s: over ranks.
        most_s: of the rank that had most.
        rank: which had most in most of the steps that had any of it.
        rank_share: in how many of those, as a share.
        above: by how much the rank with most was above the mean, as a share of the mean.
    """

    name: Phase
    share: float
    least_s: float
    mean_s: float
    most_s: float
    rank: int
    rank_share: float
    above: float

    @property
    def color(self) -> str:
        """Return the phase's colour in the chart."""
        return COLORS[self.name]


def phase_rows(steps: Steps) -> list[PhaseRow]:
    """Sum phases up over steps, the largest first; none where no step measured them."""
    timed = _timed(steps)
    rows = [row for name in PHASES if (row := _row(name, timed=timed)) is not None]
    total_s = sum(row.mean_s for row in rows)
    shared = [
        PhaseRow(**{**vars(row), "share": row.mean_s / total_s}) for row in rows if total_s > 0
    ]
    return sorted(shared, key=lambda row: -row.share)


def phase_curves(steps: Steps) -> Figure:
    """Draw the seconds of every phase over steps, on top of one another; the mean of the ranks."""
    figure = blank("seconds")
    timed = _timed(steps)
    at_step = _thin([record.step for record in timed], reduce="max")
    drawn = []
    for name, color in COLORS.items():
        seconds = _thin([phase(record, name).mean for record in timed])
        if seconds.any():
            drawn.append(seconds)
            figure.add_scatter(
                x=at_step,
                y=seconds,
                name=name,
                stackgroup="phases",
                mode="lines",
                line={"color": color, "width": 0.5},
                fillcolor=color,
                hovertemplate="%{y:.3f} s<extra>" + name + "</extra>",
            )
    if drawn:
        figure.update_yaxes(range=[0, _top(np.sum(drawn, axis=0))])
    figure.update_layout(height=340, legend={"traceorder": "normal"})
    return figure


def cut_from(steps: Steps) -> float | None:
    """Return the seconds above which the chart cuts steps off; None where it shows all whole."""
    timed = _timed(steps)
    totals = _thin([sum(phase(record, name).mean for name in PHASES) for record in timed])
    if not len(totals) or _top(totals) >= totals.max():
        return None
    return _top(totals)


def _timed(steps: Steps) -> list[StepRecord]:
    return without_profiled([record for record in steps.records if record.phases_s])


def _top(totals: np.ndarray) -> float:
    """Return where the axis ends: single steps with a checkpoint must not flatten the others."""
    return float(min(1.05 * totals.max(), _TALLEST * np.median(totals)))


def _thin(values: Sequence[float], *, reduce: str = "mean") -> np.ndarray:
    array = np.array(values, dtype=np.float64)
    return thin(array, num_points=MAX_POINTS, reduce="max" if reduce == "max" else "mean")


def _row(name: Phase, *, timed: Sequence[StepRecord]) -> PhaseRow | None:
    """Sum one phase up; None where no rank has spent any time in it. The share is added later."""
    found = [phase(record, name) for record in timed]
    spent = [each for each in found if each.most > 0]
    if not spent:
        return None
    rank, times = Counter(each.rank for each in spent).most_common(1)[0]
    mean_s, most_s = fmean(each.mean for each in found), fmean(each.most for each in found)
    return PhaseRow(
        name=name,
        share=0.0,
        least_s=fmean(each.least for each in found),
        mean_s=mean_s,
        most_s=most_s,
        rank=rank,
        rank_share=times / len(spent),
        above=most_s / mean_s - 1 if mean_s else 0.0,
    )
