"""In: sample costs, buckets and the schedule's settings. Out: four figures of the training data.

They are drawn before anything is trained, so that a person sees what the batches will be made of.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from diptych.core.records import Buckets, Manifest, ScheduleSpec
from diptych.data.bucket import bucket_name, num_buckets
from diptych.data.costs import load_costs
from diptych.report.balance import Balance, measure_balance
from diptych.report.figures import BLIND, HELDOUT, MODEL, PALETTE, blank
from diptych.report.tally import ASPECT_EDGES, LENGTH_EDGES, SourceTally, tally

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_COLORSCALE = ((0.0, "#b9cdec"), (1.0, "#1f56a8"))
_REST = "all others"


def chart(
    manifest: Manifest, *, sample_costs: Path, buckets: Buckets, schedule: ScheduleSpec
) -> tuple[Figure, Figure, Figure, Figure]:
    """Draw the training data: bucket grid, lengths, aspects, and what batches waste.

    Args:
        manifest: names the shards.
        sample_costs: the folder of every sample's lengths.
        buckets: the boundaries of image area and aspect.
        schedule: the settings that the batches are made with.

    Returns:
        `bucket_grid`, `sample_lengths`, `image_aspects`, `batch_waste`.
    """
    costs = load_costs(sample_costs, manifest=manifest, split="train")
    sources = tally(costs, buckets=buckets)
    return (
        draw_grid(sources, buckets=buckets),
        draw_lengths(sources, max_row_tokens=schedule.max_row_tokens),
        draw_aspects(sources, buckets=buckets),
        draw_waste(measure_balance(costs, buckets=buckets, spec=schedule)),
    )


def draw_grid(sources: Sequence[SourceTally], *, buckets: Buckets) -> Figure:
    """Draw the number of samples per class of area and aspect, text-only ones beside them."""
    areas, aspects = _class_names(buckets)
    counts = sum((source.buckets for source in sources), np.zeros(1, dtype=np.int64))
    text_only, grid = int(counts[0]), np.zeros((len(areas), len(aspects)), dtype=np.int64)
    if len(counts) > 1:
        grid = counts[1:].reshape(grid.shape)
    most = max(int(grid.max()), text_only, 1)
    figure = blank("", x_title="")
    columns = [aspect.replace(" ", "<br>", 1) for aspect in aspects]
    _add_cells(figure, columns=columns, rows=areas, counts=grid.tolist(), most=most, axis="x")
    _add_cells(
        figure,
        columns=["text<br>only"],
        rows=areas[:1],
        counts=[[text_only]],
        most=most,
        axis="x2",
    )
    figure.update_layout(
        height=130 + 46 * len(areas),
        hovermode="closest",
        xaxis={"domain": [0, 0.8]},
        xaxis2={"domain": [0.84, 1]},
    )
    figure.update_xaxes(showgrid=False, tickangle=0, ticks="")
    figure.update_yaxes(showgrid=False, rangemode="normal", ticks="")
    return figure


def draw_lengths(sources: Sequence[SourceTally], *, max_row_tokens: int) -> Figure:
    """Draw how many samples have how many tokens, by source, and where a row ends."""
    edges = np.append(LENGTH_EDGES, 2 * LENGTH_EDGES[-1])
    series = [(source.name, source.lengths) for source in sources]
    figure = _histogram(series, edges=edges, unit="tokens", x_title="tokens of a sample")
    _mark(figure, at=[max_row_tokens], text="longest row")
    return figure


def draw_aspects(sources: Sequence[SourceTally], *, buckets: Buckets) -> Figure:
    """Draw how many samples have a first image of which aspect, by source, with the cuts."""
    edges = np.append(ASPECT_EDGES, 2 * ASPECT_EDGES[-1])
    series = [(source.name, source.aspects) for source in sources]
    x_title = "width / height of the first image"
    figure = _histogram(series, edges=edges, unit="width / height", x_title=x_title)
    _mark(figure, at=buckets.aspects)
    return figure


def draw_waste(balance: Balance) -> Figure:
    """Draw padding and idle time of random batches beside the schedule's."""
    figure = blank("", x_title="; ".join(balance.notes))
    names = [waste.name for waste in balance.wastes]
    for name, color, values in (
        ("random batches", BLIND, [waste.before for waste in balance.wastes]),
        ("this schedule", MODEL, [waste.after for waste in balance.wastes]),
    ):
        figure.add_bar(
            x=[100 * value for value in values],
            y=names,
            name=name,
            orientation="h",
            marker={"color": color},
            text=[f"{100 * value:.1f}%" for value in values],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y}: %{x:.2f}%<extra>" + name + "</extra>",
        )
    figure.update_layout(barmode="group", bargap=0.3, hovermode="closest")
    figure.update_layout(height=110 + 60 * max(len(names), 1))
    most = max((100 * max(waste.before, waste.after) for waste in balance.wastes), default=1)
    figure.update_xaxes(ticksuffix="%", range=[0, 1.2 * max(most, 1)], showgrid=True)
    figure.update_yaxes(autorange="reversed", showgrid=False, rangemode="normal")
    if balance.refused:
        _say(figure, text=balance.refused)
    return figure


def _class_names(buckets: Buckets) -> tuple[list[str], list[str]]:
    """Name the classes of area and of aspect, each from the smallest."""
    num_aspects = len(buckets.aspects) + 1
    names = [
        bucket_name(buckets, bucket).removeprefix("area ").split(", aspect ")
        for bucket in range(1, num_buckets(buckets))
    ]
    return [area for area, _ in names[::num_aspects]], [aspect for _, aspect in names[:num_aspects]]


def _add_cells(
    figure: Figure,
    *,
    columns: list[str],
    rows: list[str],
    counts: list[list[int]],
    most: int,
    axis: Literal["x", "x2"],
) -> None:
    """Add a grid of counts; an empty cell stays empty."""
    figure.add_heatmap(
        x=columns,
        y=rows,
        # A root keeps rare buckets in sight.
        z=[[(count / most) ** 0.5 if count else None for count in row] for row in counts],
        text=[[f"{count:,}" if count else "" for count in row] for row in counts],
        texttemplate="%{text}",
        hovertemplate="%{x}, %{y}: %{text} samples<extra></extra>",
        hoverongaps=False,
        zmin=0,
        zmax=1,
        colorscale=_COLORSCALE,
        showscale=False,
        xgap=2,
        ygap=2,
        xaxis=axis,
    )


def _histogram(
    series: Iterable[tuple[str, np.ndarray]], *, edges: np.ndarray, unit: str, x_title: str
) -> Figure:
    """Draw counts per class of a logarithmic axis, the sources on top of one another."""
    shown = _few(list(series))
    figure = blank("samples", x_title=x_title)
    total = sum((counts for _, counts in shown), np.zeros(len(edges) - 1, dtype=np.int64))
    filled = np.flatnonzero(total)
    span = slice(filled[0], filled[-1] + 1) if len(filled) else slice(0, 0)
    low, high = edges[:-1][span], edges[1:][span]
    labels = [f"{a:.3g} to {b:.3g}" for a, b in zip(low, high, strict=True)]
    for number, (name, counts) in enumerate(shown):
        figure.add_bar(
            # The bars of a logarithmic axis are placed by hand: each from its class's start.
            x=low.tolist(),
            width=(high - low).tolist(),
            offset=0,
            y=counts[span].tolist(),
            customdata=labels,
            name=html.escape(name),
            marker={"color": PALETTE[min(number, len(PALETTE) - 1)], "line": {"width": 0}},
            hovertemplate=f"%{{customdata}} {unit}: %{{y:,}}<extra>{html.escape(name)}</extra>",
        )
    figure.update_layout(
        barmode="stack",
        bargap=0,
        hovermode="closest",
        showlegend=len(shown) > 1,
        legend={"traceorder": "normal"},
    )
    if len(low):
        limits = [float(np.log10(low[0] / 1.1)), float(np.log10(high[-1] * 1.1))]
        figure.update_xaxes(type="log", range=limits, **_ticks(low[0], high[-1]))
    else:
        _say(figure, text="No sample")
    return figure


def _say(figure: Figure, *, text: str) -> None:
    """Put words where there is nothing to draw, instead of axes without numbers."""
    lines = "<br>".join(textwrap.wrap(html.escape(text), width=60))
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    figure.add_annotation(x=0.5, y=0.5, xref="paper", yref="paper", text=lines, showarrow=False)


def _few(series: list[tuple[str, np.ndarray]]) -> list[tuple[str, np.ndarray]]:
    """Keep the sources with the most samples, and add up the others."""
    by_size = sorted(series, key=lambda item: -int(item[1].sum()))
    large = {name for name, _ in by_size[: len(PALETTE) - 1]}
    kept = [(name, counts) for name, counts in series if name in large]
    rest = [counts for name, counts in series if name not in large]
    return [*kept, (_REST, np.sum(rest, axis=0))] if rest else kept


def _ticks(low: float, high: float) -> dict[str, Any]:
    ticks = [part * 10.0**power for power in range(-3, 8) for part in (1, 2, 5)]
    inside = [tick for tick in ticks if low / 1.1 <= tick <= high * 1.1]
    return {"tickvals": inside, "ticktext": [f"{tick:,g}" for tick in inside]}


def _mark(figure: Figure, *, at: Iterable[float], text: str = "") -> None:
    """Draw vertical lines where they are in sight of the bars."""
    limits = figure.layout.xaxis.range
    for value in at:
        if not limits or not limits[0] <= np.log10(value) <= limits[1]:
            continue
        figure.add_vline(x=value, line={"color": HELDOUT, "dash": "dot", "width": 1.5})
        if text:
            # On a logarithmic axis an annotation's place is the power, a line's the value.
            place = {"x": float(np.log10(value)), "xanchor": "right", "y": 1, "yref": "paper"}
            figure.add_annotation(text=text, showarrow=False, **place)
