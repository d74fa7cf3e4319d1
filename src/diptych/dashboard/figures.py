"""Charts of runs in, plotly's figures out: plain dictionaries with as many points as are seen.

Names that came from data are escaped, for plotly reads its texts as a kind of HTML.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from diptych.core.records import Alert
from diptych.dashboard.charts import Axis, Chart, Curve, match
from diptych.dashboard.logs import Table
from diptych.dashboard.thin import MOST_POINTS, in_view, means, smooth, thin

Figure = dict[str, Any]
X = Literal["step", "tokens", "hours"]
View = tuple[float, float] | None

COLORS = (
    "#3b7dd8",
    "#d9822b",
    "#2f9e77",
    "#b5487f",
    "#8a6fd1",
    "#a08a1f",
    "#3a9bb0",
    "#c75146",
)
X_TITLES: dict[X, str] = {"step": "step", "tokens": "tokens", "hours": "hours of training"}
_DASHES = ("solid", "dot", "dash", "dashdot", "longdash")
_GRID = "rgba(128, 136, 150, 0.2)"
_MOST_CURVES = 24
_PAGE_POINTS = 6000
_LEAST_POINTS = 250
_MOST_MARKS = 40
_ALERT = "#d03b3b"


@dataclass(frozen=True)
class Shown:
    """A run as it is drawn: its name, its colour's number, what is known of it."""

    name: str
    color: int
    table: Table
    alerts: tuple[Alert, ...] = ()


@dataclass(frozen=True)
class Look:
    """How charts are drawn: over what, which part of it, how smoothly."""

    x: X = "step"
    view: View = None
    width: int = 1
    log: bool = False


def x_of(table: Table, *, axis: Axis, x: X) -> np.ndarray:
    """Return what a table is drawn over, [N]: steps, tokens, hours, or milliseconds since 1970."""
    if axis == "clock":
        return table.column("time_s") * 1000.0
    steps = table.column("step")
    if x == "step" or len(steps) == 0:
        return steps
    # Of steps that were left out, each was as the next one that is there.
    gaps = np.diff(steps, prepend=0.0)
    if x == "hours":
        each = table.column("step_s").astype(np.float64) / 3600
    else:
        each = table.column("num_text_tokens").astype(np.float64)
        each = each + table.column("num_image_tokens")
    return np.cumsum(np.nan_to_num(each) * gaps)


def draw(chart: Chart, runs: Sequence[Shown], *, look: Look) -> Figure | None:
    """Draw one chart; None where no run has measured it.

    Args:
        chart: what.
        runs: of which; a stack is of the first alone.
        look: how.
    """
    traces = _stack(chart, runs[0], look=look) if chart.stack and runs else []
    if not chart.stack:
        traces = _lines(chart, runs, look=look)
    if not traces:
        return None
    marks = _attempt_marks(chart, runs, look=look)
    return {"data": traces, "layout": _layout(chart, traces, look=look, marks=marks)}


def _lines(chart: Chart, runs: Sequence[Shown], *, look: Look) -> list[Figure]:
    found = [
        (run, curve, column, label)
        for run in runs
        for curve in chart.curves
        for column, label in match(curve, names=run.table.names)
        if np.isfinite(run.table.column(column)).any()
    ][:_MOST_CURVES]
    labels = list(dict.fromkeys(label for _, _, _, label in found))
    most = max(_LEAST_POINTS, min(MOST_POINTS, _PAGE_POINTS // max(len(found), 1)))
    is_alone = len(runs) == 1
    traces: list[Figure] = []
    for run, curve, column, label in found:
        x, y = _points(chart, run.table, column=column, look=look, most=most, curve=curve)
        named = _one_of_many(run, curve, label, number=labels.index(label))
        if is_alone:
            named = _one_alone(run, curve, label, labels=labels)
        traces.append({"type": "scatter", "x": _packed(x, "f8"), "y": _packed(y, "f4"), **named})
    if not is_alone and len(labels) > 1:
        traces += [_key(label, number=number) for number, label in enumerate(labels)]
    if chart.name == "loss":
        traces += [trace for run in runs for trace in _alerts(run, look=look)]
    return traces


def _one_alone(run: Shown, curve: Curve, label: str, *, labels: Sequence[str]) -> Figure:
    """Return how a curve of the one run that is shown looks: colours are labels."""
    color = COLORS[(run.color + labels.index(label)) % len(COLORS)]
    style = _style(curve, color=color, dash="solid")
    return {"name": _text(label or run.name), "showlegend": len(labels) > 1, **style}


def _one_of_many(run: Shown, curve: Curve, label: str, *, number: int) -> Figure:
    """Return how a curve looks beside those of other runs: colours are runs, dashes are labels."""
    style = _style(curve, color=COLORS[run.color], dash=_DASHES[number % len(_DASHES)])
    return {"name": _text(f"{run.name} {label}".strip()), "showlegend": False, **style}


def _points(
    chart: Chart, table: Table, *, column: str, look: Look, most: int, curve: Curve
) -> tuple[np.ndarray, np.ndarray]:
    x = x_of(table, axis=chart.axis, x=look.x)
    y = table.column(column)
    if chart.smoothed and curve.style == "line":
        y = smooth(y, width=look.width)
    part = in_view(x, view=look.view)
    return thin(x[part], y[part] / np.float32(chart.scale), most=most)


def _stack(chart: Chart, run: Shown, *, look: Look) -> list[Figure]:
    names = run.table.names
    curves = [curve for curve in chart.curves if curve.column in names]
    if not curves:
        return []
    x = x_of(run.table, axis=chart.axis, x=look.x)
    part = in_view(x, view=look.view)
    values = np.stack([run.table.column(curve.column)[part] for curve in curves], axis=1)
    if not np.isfinite(values).any():
        return []
    x, averaged = means(x[part], values, most=200)
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": curve.label,
            "stackgroup": "phases",
            "x": _packed(x, "f8"),
            "y": _packed(averaged[:, number], "f4"),
            "line": {"width": 0.5, "color": COLORS[number % len(COLORS)]},
            "fillcolor": _faint(COLORS[number % len(COLORS)]),
        }
        for number, curve in enumerate(curves)
        if averaged[:, number].any()
    ]


def _style(curve: Curve, *, color: str, dash: str) -> Figure:
    if curve.style == "points":
        marker = {"size": 4, "color": color, "line": {"width": 1, "color": "rgba(128,128,128,.6)"}}
        return {
            "mode": "lines+markers",
            "line": {"width": 1, "color": color, "dash": "dot"},
            "marker": marker,
        }
    return {"mode": "lines", "line": {"width": 1.3, "color": color, "dash": dash}}


def _key(label: str, *, number: int) -> Figure:
    """Say in the legend which dashes are which curve, where colours are runs."""
    line = {"width": 1.5, "color": "#808896", "dash": _DASHES[number % len(_DASHES)]}
    return {
        "type": "scatter",
        "mode": "lines",
        "name": _text(label),
        "x": [None],
        "y": [None],
        "line": line,
        "showlegend": True,
        "hoverinfo": "skip",
    }


def _alerts(run: Shown, *, look: Look) -> list[Figure]:
    """Mark alerts where the loss was then."""
    steps, losses = run.table.column("step"), run.table.column("loss")
    alerts = [alert for alert in run.alerts if not alert.over][-_MOST_MARKS:]
    if not alerts or len(steps) == 0:
        return []
    at = np.minimum(np.searchsorted(steps, [alert.step for alert in alerts]), len(steps) - 1)
    x = x_of(run.table, axis="steps", x=look.x)[at]
    y = np.where(np.isfinite(losses[at]), losses[at], np.nanmax(losses))
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "alerts",
            "x": _packed(x, "f8"),
            "y": _packed(y, "f4"),
            "hovertext": [_text(f"{alert.kind}: {alert.text}"[:160]) for alert in alerts],
            "hoverinfo": "text",
            "marker": {"symbol": "triangle-down", "size": 9, "color": _ALERT},
            "showlegend": False,
        }
    ]


def _attempt_marks(chart: Chart, runs: Sequence[Shown], *, look: Look) -> list[Figure]:
    """Draw a line where another attempt of a run goes on."""
    if chart.axis != "steps":
        return []
    shapes: list[Figure] = []
    for run in runs[:1] if chart.stack else runs:
        attempts = run.table.column("attempt")
        begins = np.flatnonzero(np.diff(attempts) > 0) + 1
        x = x_of(run.table, axis="steps", x=look.x)
        shapes += [_mark(float(x[begin]), color=COLORS[run.color]) for begin in begins]
    return shapes[-_MOST_MARKS:]


def _mark(x: float, *, color: str) -> Figure:
    line = {"width": 1, "dash": "dot", "color": color}
    return {
        "type": "line",
        "xref": "x",
        "yref": "paper",
        "x0": x,
        "x1": x,
        "y0": 0,
        "y1": 1,
        "line": line,
        "layer": "below",
    }


def _layout(chart: Chart, traces: Iterable[Figure], *, look: Look, marks: list[Figure]) -> Figure:
    axis: Figure = {
        "gridcolor": _GRID,
        "zeroline": False,
        "ticks": "",
        "automargin": False,
        "linecolor": _GRID,
    }
    is_log = chart.log and look.log
    y_axis = {**axis, "fixedrange": True, "nticks": 6, "type": "log" if is_log else "linear"}
    if chart.percent:
        y_axis |= {"tickformat": ".0%", "rangemode": "tozero"}
    elif chart.stack or chart.axis == "clock" or chart.from_zero:
        y_axis["rangemode"] = "tozero"
    if chart.unit:
        y_axis["ticksuffix"] = f" {chart.unit}"
        y_axis["showticksuffix"] = "last"
    x_axis = {**axis, "type": "date" if chart.axis == "clock" else "linear", "nticks": 7}
    x_axis |= {"range": list(look.view)} if look.view else {"autorange": True}
    has_legend = any(trace.get("showlegend", True) for trace in traces)
    above = 22 if has_legend and not chart.stack else 8
    return {
        "height": 220,
        "margin": {"l": 48, "r": 10, "t": above, "b": 24},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 11, "color": "#767e8c"},
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": "#262b33", "font": {"size": 11, "color": "#eceff4"}},
        "hoverdistance": 30,
        "dragmode": "zoom",
        "showlegend": has_legend,
        "legend": _legend(chart),
        "xaxis": x_axis,
        "yaxis": y_axis,
        "shapes": marks,
        "uirevision": f"{chart.name} {look.x} {look.view}",
    }


def _legend(chart: Chart) -> Figure:
    """Put it above the lines, and beside a stack in the stack's order."""
    font = {"size": 10}
    if chart.stack:
        return {"x": 1.01, "y": 1.0, "traceorder": "reversed", "itemwidth": 30, "font": font}
    return {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "font": font}


def _packed(values: np.ndarray, kind: Literal["f4", "f8"]) -> dict[str, str]:
    """Write an array as plotly.js reads it without parsing numbers."""
    data = np.ascontiguousarray(values, dtype=f"<{kind}").tobytes()
    return {"dtype": kind, "bdata": base64.b64encode(data).decode()}


def _faint(color: str) -> str:
    red, green, blue = (int(color[begin : begin + 2], 16) for begin in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, 0.45)"


def _text(text: str) -> str:
    return html.escape(text, quote=False)
