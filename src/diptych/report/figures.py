"""In: a run's step log and scores. Out: plotly figures, for kedro-viz and for the page.

Backgrounds are transparent and every colour reads on white and on black, so that one figure serves
the light and the dark page.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from diptych.core.records import Interval, Run, Scores
from diptych.report.steps import Steps, read_steps, thin

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MAX_POINTS = 1000
"""Longer curves are reduced to this many points; the page says how."""

MODEL = "#3b7ddd"
BLIND = "#8b93a1"
HELDOUT = "#e07b1a"
WAIT = "#c2557f"
PALETTE = (MODEL, HELDOUT, "#2f9e77", WAIT, "#8a6fd1", "#b0932c", "#4aa3b8", BLIND)
"""Colours of sources; the last is for all further ones."""
GRID = "rgba(128, 136, 150, 0.22)"
INK = "#767e8c"


def plot(run: Run, scores: Scores) -> tuple[Figure, Figure]:
    """Draw the loss curve of a run and the score bars of its release."""
    return loss_curve(read_steps(Path(run.folder))), score_bars(scores)


def loss_curve(steps: Steps) -> Figure:
    """Draw training loss (each point and smoothed) and held-out loss over steps."""
    import plotly.graph_objects as go

    at_step = thin(steps.column("step"), num_points=MAX_POINTS, reduce="max")
    loss = thin(steps.column("loss"), num_points=MAX_POINTS)
    figure = blank("loss per label token")
    _add_smoothed(figure, at_step=at_step, values=loss, name="training")
    heldout = steps.column("heldout_loss")
    measured = ~np.isnan(heldout)
    if measured.any():
        figure.add_trace(
            go.Scatter(
                x=steps.column("step")[measured],
                y=heldout[measured],
                name="held out",
                mode="lines+markers",
                line={"color": HELDOUT, "width": 2.5},
                marker={"size": 7},
            )
        )
    _scale(figure, values=np.concatenate([loss, heldout[measured]]))
    return figure


def curves(steps: Steps, *, max_grad_norm: float) -> dict[str, Figure]:
    """Draw the page's small curves: learning rate, gradient norm, speed and the step's time."""
    at_step = thin(steps.column("step"), num_points=MAX_POINTS, reduce="max")

    def column(name: str, reduce: Any = "mean") -> np.ndarray:
        return thin(steps.column(name), num_points=MAX_POINTS, reduce=reduce)

    rate = blank("")
    rate.add_scatter(x=at_step, y=column("lr"), name="learning rate", line={"color": MODEL})
    norm = blank("")
    _add_smoothed(norm, at_step=at_step, values=column("grad_norm", "max"), name="gradient norm")
    _scale(norm, values=column("grad_norm", "max"))
    norm.add_hline(y=max_grad_norm, line={"color": HELDOUT, "dash": "dot", "width": 1.5})
    speed = blank("")
    _add_smoothed(speed, at_step=at_step, values=column("tokens_per_s"), name="tokens/s")
    time = blank("")
    waiting = column("data_s")
    time.add_scatter(
        x=at_step,
        y=waiting,
        name="waiting for data",
        stackgroup="time",
        line={"color": WAIT, "width": 1},
    )
    time.add_scatter(
        x=at_step,
        y=np.maximum(column("step_s") - waiting, 0),
        name="computing",
        stackgroup="time",
        line={"color": MODEL, "width": 1},
    )
    for figure in (rate, norm, speed):
        figure.update_layout(showlegend=False, height=230, margin={"t": 10})
    time.update_layout(height=230)
    return {"lr": rate, "grad_norm": norm, "speed": speed, "time": time}


def vision_curve(steps: Steps) -> Figure:
    """Draw the contrastive loss over steps, each point and smoothed; nothing where none is made."""
    figure = blank("loss per sample")
    values = thin(steps.column("vision_loss"), num_points=MAX_POINTS)
    if np.isfinite(values).any():
        at_step = thin(steps.column("step"), num_points=MAX_POINTS, reduce="max")
        _add_smoothed(figure, at_step=at_step, values=values, name="loss/vision")
        _scale(figure, values=values)
    figure.update_layout(showlegend=False, height=230, margin={"t": 10})
    return figure


def source_curves(steps: Steps, *, sources: Sequence[str]) -> Figure:
    """Draw every source's loss over steps: training smoothed, held out as it was measured."""
    figure = blank("loss per label token")
    at_step = thin(steps.column("step"), num_points=MAX_POINTS, reduce="max")
    shown = [np.empty(0)]
    for number, source in enumerate(sources):
        color = PALETTE[min(number, len(PALETTE) - 1)]
        name = html.escape(source)
        loss = thin(steps.of_source("loss_by_source", source=source), num_points=MAX_POINTS)
        if np.isfinite(loss).any():
            shown.append(loss)
            line = {"color": color, "width": 2}
            figure.add_scatter(x=at_step, y=smooth(loss), name=name, line=line)
        heldout = steps.of_source("heldout_loss_by_source", source=source)
        measured = np.isfinite(heldout)
        if measured.any():
            shown.append(heldout[measured])
            figure.add_scatter(
                x=steps.column("step")[measured],
                y=heldout[measured],
                name=f"{name}, held out",
                mode="markers",
                marker={"color": color, "size": 7, "symbol": "diamond"},
            )
    _scale(figure, values=np.concatenate(shown))
    return figure


def waste_curves(steps: Steps) -> Figure:
    """Draw the shares of padding and of idle ranks over steps, smoothed, as far as measured."""
    figure = blank("")
    at_step = thin(steps.column("step"), num_points=MAX_POINTS, reduce="max")
    for column, name, color in (
        ("padding_fraction", "padding", MODEL),
        ("idle_fraction", "idle ranks", WAIT),
    ):
        values = thin(steps.column(column), num_points=MAX_POINTS)
        if np.isfinite(values).any():
            percents = 100 * smooth(values)
            figure.add_scatter(x=at_step, y=percents, name=name, line={"color": color, "width": 2})
    figure.update_layout(height=230)
    figure.update_yaxes(ticksuffix="%")
    return figure


def score_bars(scores: Scores) -> Figure:
    """Draw exact match per question kind with its interval, beside the blind baseline."""
    kinds = order_kinds(scores)
    figure = blank("")
    labels = [html.escape(kind) for kind in kinds]
    series = (
        ("with the images", scores.exact_match, MODEL),
        ("without the images", scores.blind_exact_match, BLIND),
    )
    for name, intervals, color in series:
        found = [intervals.get(kind) for kind in kinds]
        figure.add_bar(
            y=labels,
            x=[_percent(interval, "value") for interval in found],
            name=name,
            orientation="h",
            marker={"color": color},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [_reach(interval, "high") for interval in found],
                "arrayminus": [_reach(interval, "low") for interval in found],
                "color": INK,
                "thickness": 1.5,
                "width": 4,
            },
            hovertemplate="%{y}: %{x:.1f}%<extra>" + name + "</extra>",
        )
    figure.update_layout(
        barmode="group",
        bargap=0.35,
        bargroupgap=0.08,
        hovermode="closest",
        height=110 + 56 * max(len(kinds), 1),
    )
    figure.update_xaxes(range=[0, 102], ticksuffix="%", title={"text": "answered exactly"})
    figure.update_yaxes(autorange="reversed", showgrid=False, rangemode="normal", automargin=True)
    return figure


def order_kinds(scores: Scores) -> list[str]:
    """Return the kinds with the headline first and the rest by name."""
    first = headline(scores)
    return sorted(scores.exact_match, key=lambda kind: (kind != first, kind != "all", kind))


def headline(scores: Scores) -> str | None:
    """Return the kind the summary is about: reading, else all questions, else the first."""
    for kind in ("read", "all", *sorted(scores.exact_match)):
        if kind in scores.exact_match:
            return kind
    return None


def smooth(values: np.ndarray, *, half_life: float = 6.0) -> np.ndarray:
    """Return the exponential moving average of [n] values, unbiased at the start; nan is skipped.

    Args:
        values: [n] float64.
        half_life: after how many values a value counts half.
    """
    keep = 0.5 ** (1 / half_life)
    average = weight = 0.0
    smoothed = np.full(len(values), np.nan)
    for place, value in enumerate(values):
        if np.isfinite(value):
            average = keep * average + (1 - keep) * value
            weight = keep * weight + (1 - keep)
        if weight:
            smoothed[place] = average / weight
    return smoothed


def _scale(figure: Figure, *, values: np.ndarray) -> None:
    """Make the vertical axis logarithmic where [n] values span more than it can show otherwise."""
    finite = values[np.isfinite(values)]
    if not len(finite) or finite.min() <= 0 or finite.max() < 20 * finite.min():
        return
    ticks = [part * 10.0**power for power in range(-8, 9) for part in (1, 2, 5)]
    span = np.log10([finite.min() / 2, finite.max() * 1.5])
    figure.update_yaxes(
        type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks], range=span.tolist()
    )


def _add_smoothed(figure: Figure, *, at_step: np.ndarray, values: np.ndarray, name: str) -> None:
    """Add a curve twice: faint as it was measured, strong as its moving average."""
    figure.add_scatter(
        x=at_step, y=values, name=name, line={"color": MODEL, "width": 1}, opacity=0.35
    )
    figure.add_scatter(
        x=at_step, y=smooth(values), name=f"{name}, smoothed", line={"color": MODEL, "width": 2.5}
    )


def blank(unit: str, *, x_title: str = "step") -> Figure:
    """Return a figure without traces, its axes named, for both colour schemes."""
    import plotly.graph_objects as go

    figure = go.Figure()
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": GRID, "automargin": True}
    figure.update_layout(
        template=None,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13, "color": INK},
        margin={"l": 8, "r": 12, "t": 34, "b": 8},
        hovermode="x unified",
        height=300,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    )
    figure.update_xaxes(**axis, title={"text": x_title, "font": {"size": 12}}, showgrid=False)
    title = {"text": unit, "font": {"size": 12}} if unit else None
    figure.update_yaxes(**axis, rangemode="tozero", title=title)
    return figure


def _percent(interval: Interval | None, end: str) -> float | None:
    return None if interval is None else 100 * getattr(interval, end)


def _reach(interval: Interval | None, end: str) -> float | None:
    return None if interval is None else 100 * abs(getattr(interval, end) - interval.value)
