"""The page: what is shown in, Dash's components out. All text is children, never markup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import dcc, html

from diptych.dashboard.answers import Answer
from diptych.dashboard.charts import TABS
from diptych.dashboard.facts import Words
from diptych.dashboard.figures import COLORS, X_TITLES
from diptych.dashboard.view import Drawn, Told
from diptych.dashboard.wanted import MOST_RUNS, Chosen

REFRESH_MS = 2000
_GRAPH: Any = {"displayModeBar": False, "displaylogo": False, "responsive": True}
_EMPTY: dict[str, Any] = {"data": [], "layout": {"height": 60}}


def lay_out(
    lines: Sequence[dict[str, Any]],
    *,
    problems: Sequence[str],
    chosen: Sequence[Chosen],
    folders: Sequence[str],
    status: str = "",
    word: str = "",
) -> html.Div:
    """Lay out the page as it opens: the list, the run that is chosen; charts come on their own."""
    stores = [
        dcc.Store(id="chosen", data=[each.model_dump() for each in chosen]),
        dcc.Store(id="views", data={"steps": None, "clock": None}),
        dcc.Store(id="word", data=word),
        dcc.Store(id="shown", data=word),
        dcc.Store(id="opened"),
        dcc.Store(id="urgent"),
        dcc.Store(id="lines", data=list(lines)),
        dcc.Store(id="painted"),
        dcc.Interval(id="clock", interval=REFRESH_MS),
    ]
    left = html.Section(
        [
            html.Div(
                [
                    html.H1("Runs"),
                    dcc.Input(id="filter", placeholder="find", type="text", debounce=False),
                ],
                className="bar",
            ),
            html.Div(id="list"),
            html.Ul(say_problems(problems), id="problems"),
            html.P(" · ".join(folders), className="faint"),
        ],
        id="left",
    )
    right = html.Section(
        [
            html.Div([_tabs(), *_settings()], className="bar"),
            html.Div(_focus(chosen, status=status), className="bar"),
            html.Div([], id="charts"),
            html.Div([], id="words"),
        ],
        id="right",
    )
    return html.Div([*stores, left, right], id="page")


def say_problems(problems: Sequence[str]) -> list[html.Li]:
    """Say what is wrong with runs."""
    return [html.Li(line) for line in problems[:20]]


def focus_options(chosen: Sequence[Chosen]) -> list[dict[str, Any]]:
    """Offer the chosen runs, each with its colour: the charts' legend, and who is shown alone."""
    return [
        {
            "label": html.Span(
                [
                    html.I(style={"background": COLORS[each.color]}),
                    each.key.partition("/")[2],
                ],
                className="chip",
            ),
            "value": each.key,
        }
        for each in chosen
    ]


def chart_cards(drawn: Sequence[Drawn]) -> list[html.Div]:
    """Make a card of every chart."""
    return [
        html.Div(
            [
                html.H2(each.chart.title),
                html.P("not measured", className="none"),
                dcc.Graph(
                    id={"figure": each.chart.name, "axis": each.chart.axis},
                    figure=figure_of(each),
                    config=_GRAPH,
                    responsive=True,
                ),
            ],
            id={"card": each.chart.name},
            className=card_class(each),
        )
        for each in drawn
    ]


def figure_of(drawn: Drawn) -> dict[str, Any]:
    """Return a chart's figure, an empty one where there is none."""
    return drawn.figure or _EMPTY


def card_class(drawn: Drawn) -> str:
    """Return how a chart's card looks: without a figure it says that nothing was measured."""
    return "card" if drawn.figure else "card absent"


def say(told: Told) -> list[Any]:
    """Lay out what a tab tells in words."""
    parts: list[Any] = [html.P(told.note, className="note")] if told.note else []
    if told.answers:
        parts.append(html.Div([_answer(each) for each in told.answers], className="answers"))
    return parts + [_table(words) for words in told.tables]


def _table(words: Words) -> html.Div:
    if not words.rows:
        return html.Div([html.H2(words.title), html.P(words.empty, className="faint")])
    head = html.Thead(html.Tr([html.Th(column) for column in words.columns]))
    body = html.Tbody([html.Tr([html.Td(cell) for cell in row]) for row in words.rows])
    return html.Div([html.H2(words.title), html.Table([head, body])])


def _answer(answer: Answer) -> html.Figure:
    texts = {
        "asked": answer.question,
        "right": answer.answer,
        "answered": answer.prediction,
        "without images": answer.blind_prediction,
    }
    rows = [html.Tr([html.Th(name), html.Td(text)]) for name, text in texts.items()]
    outcome = "right" if answer.correct else "wrong"
    images = [html.Img(src=image, alt="") for image in answer.images]
    caption = html.Figcaption([html.B(outcome, className=outcome), f" {answer.kind}"])
    return html.Figure([*images, html.Table(html.Tbody(rows)), caption])


def _tabs() -> dcc.RadioItems:
    options = [{"label": title, "value": tab} for tab, title in TABS.items()]
    return dcc.RadioItems(options, "loss", id="tab", inline=True, className="tabs")


def _settings() -> list[Any]:
    widths = {1: "as it is", 11: "mean of 11", 101: "mean of 101", 1001: "mean of 1001"}
    return [
        html.Label(
            [
                "over ",
                dcc.RadioItems(dict(X_TITLES), "step", id="x", inline=True, className="switch"),
            ]
        ),
        html.Label(
            [
                "curves ",
                dcc.RadioItems(
                    [{"label": text, "value": width} for width, text in widths.items()],
                    1,
                    id="smooth",
                    inline=True,
                    className="switch",
                ),
            ]
        ),
        dcc.Checklist({"log": "log scale"}, [], id="log", inline=True, className="switch"),
    ]


def _focus(chosen: Sequence[Chosen], *, status: str) -> list[Any]:
    return [
        dcc.RadioItems(
            focus_options(chosen),
            chosen[0].key if chosen else None,
            id="focus",
            inline=True,
            className="switch",
        ),
        html.Div(dcc.RadioItems([], None, id="node", inline=True, className="switch"), id="nodes"),
        html.Span(status, id="status", className="faint"),
        html.Span(
            f"Tick up to {MOST_RUNS} runs to compare them. Drag in a chart to zoom, click twice to "
            "see all.",
            className="faint hint",
        ),
    ]
