"""The server: a desk in, a page on one address out. It only reads, and answers nobody else.

A request must name this machine as its host, so a name that some page has rebound to it is refused.
The page may load nothing from elsewhere, be framed by nobody and run no code that is not its own.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import dash
import flask
from dash import ALL, ClientsideFunction, Dash, Input, Output, Patch, State
from dash.exceptions import PreventUpdate
from pydantic import ValidationError
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from diptych.core.errors import ConfigError
from diptych.dashboard import page
from diptych.dashboard.charts import charts_of, first_names
from diptych.dashboard.view import Desk
from diptych.dashboard.wanted import Chosen, Wanted

_ASSETS = Path(__file__).parent / "assets"
_CHARTS = {"figure": ALL, "axis": ALL}
_HEADERS = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
_MOST_BYTES = 1024 * 1024


def make_app(desk: Desk, *, hosts: Iterable[str] = ()) -> Dash:
    """Make the app over a desk.

    Args:
        desk: what is shown.
        hosts: names that a request may call this machine by, beside localhost and any address.
    """
    app = Dash(
        "diptych",
        title="Diptych runs",
        update_title="",
        assets_folder=str(_ASSETS),
        pages_folder="",
        serve_locally=True,
        suppress_callback_exceptions=True,
        add_log_handler=False,
    )
    app.layout = lambda: _open(desk)
    _add_callbacks(app, desk=desk)
    _guard(app, hosts={"localhost", *(host.lower() for host in hosts)})
    _warm(app)
    return app


class _Quiet(WSGIRequestHandler):
    """Keeps connections open, and says nothing of requests that went well."""

    protocol_version = "HTTP/1.1"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""


def listen(app: Dash, *, host: str, port: int) -> BaseWSGIServer:
    """Bind the address; `serve_forever` then serves, a thread a connection.

    Raises:
        ConfigError: another program has it.
    """
    try:
        return make_server(host, port, app.server, threaded=True, request_handler=_Quiet)
    except (OSError, SystemExit) as error:
        raise ConfigError(
            f"{host}:{port} cannot be served: {getattr(error, 'strerror', None) or 'it is in use'}",
            allowed="An address of this machine, and a port that nothing else has",
            cure="Give another --port, or 0 for any that is free",
        ) from error


def is_loopback(host: str) -> bool:
    """Say whether an address is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def own_names(host: str) -> set[str]:
    """Return the names that this machine may be called by where it is reached from others."""
    return set() if is_loopback(host) else {host, socket.gethostname(), socket.getfqdn()}


def _guard(app: Dash, *, hosts: set[str]) -> None:
    server = app.server
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.config["MAX_CONTENT_LENGTH"] = _MOST_BYTES

    @server.before_request
    def check() -> flask.Response | None:
        asked = [flask.request.headers.get("Host", "")]
        origin = flask.request.headers.get("Origin")
        if origin is not None:
            asked.append(origin.partition("://")[2])
        if all(_is_own(name, hosts=hosts) for name in asked):
            return None
        text = "This page answers under this machine's own name or address only.\n"
        return flask.Response(text, status=403, mimetype="text/plain")

    @server.after_request
    def add_headers(response: flask.Response) -> flask.Response:
        response.headers.update(_HEADERS)
        response.headers["Content-Security-Policy"] = _policy(app)
        if response.mimetype in ("text/html", "application/json"):
            response.headers["Cache-Control"] = "no-store"
        return response


def _policy(app: Dash) -> str:
    """Return what the page may load: its own files, and Dash's inline scripts by their hashes."""
    return "; ".join(
        [
            "default-src 'none'",
            " ".join(["script-src 'self'", *app.csp_hashes()]),
            # plotly and the list write styles as they draw.
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data: blob:",
            "font-src 'self' data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def _is_own(asked: str, *, hosts: set[str]) -> bool:
    """Say whether a Host header names this machine: an address cannot be rebound, a name can."""
    name = asked.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in hosts
    return True


def _warm(app: Dash) -> None:
    """Do once what is done once: who looks first does not wait for it."""
    client = app.server.test_client()
    for path in re.findall(r'src="([^"]+)"', client.get("/").get_data(as_text=True)):
        client.get(path).close()
    client.get("/_dash-layout")


def _open(desk: Desk) -> Any:
    """Lay out the page with the run that moved last."""
    lines = desk.lines()
    chosen = [Chosen(key=line["key"]) for line in lines[:1]]
    wanted = Wanted(chosen=tuple(chosen))
    return page.lay_out(
        lines,
        problems=desk.problems(),
        chosen=chosen,
        status=desk.status(wanted),
        word=desk.word(wanted),
        folders=[str(folder) for folder in desk.runs.folders],
    )


_WANTED = {
    "tab": ("tab", "value"),
    "chosen": ("chosen", "data"),
    "views": ("views", "data"),
    "x": ("x", "value"),
    "smooth": ("smooth", "value"),
    "log": ("log", "value"),
    "focus": ("focus", "value"),
    "node": ("node", "value"),
}


def _asked(**values: Any) -> Wanted:
    """Check what a page asks for."""
    try:
        return Wanted.model_validate({**values, "log": bool(values.get("log"))})
    except ValidationError:
        flask.abort(400, "The page asked for what there is not")


def _of(kind: type, *, but: Sequence[str] = ()) -> dict[str, Any]:
    return {name: kind(*where) for name, where in _WANTED.items() if name not in but}


def _add_callbacks(app: Dash, *, desk: Desk) -> None:
    _add_clientside(app)
    _add_drawing(app, desk=desk)
    _add_words(app, desk=desk)
    lock = threading.Lock()

    @app.callback(
        Output("lines", "data"),
        Output("problems", "children"),
        Output("word", "data"),
        {
            "count": Input("clock", "n_intervals"),
            "rows": State("lines", "data"),
            "shown": State("shown", "data"),
            **_of(State),
        },
        prevent_initial_call=True,
    )
    def refresh(count: int, rows: Any, shown: str, **wanted: Any) -> tuple[Any, ...]:
        asked = _asked(**wanted)
        with lock:
            lines, new = desk.lines(), desk.word(asked)
        is_same = lines == rows
        return (
            dash.no_update if is_same else lines,
            dash.no_update if is_same else page.say_problems(desk.problems()),
            dash.no_update if new == shown else new,
        )


def _add_clientside(app: Dash) -> None:
    def own(name: str) -> ClientsideFunction:
        return ClientsideFunction("dashboard", name)

    app.clientside_callback(
        own("list"),
        Output("painted", "data"),
        Input("lines", "data"),
        Input("chosen", "data"),
        Input("filter", "value"),
        Input("clock", "n_intervals"),
    )
    app.clientside_callback(
        own("zoom"),
        Output("views", "data"),
        Input(_CHARTS, "relayoutData"),
        Input("x", "value"),
        State("views", "data"),
        prevent_initial_call=True,
    )


def _add_drawing(app: Dash, *, desk: Desk) -> None:
    """Draw what a person looks at first, and the rest once that is on the screen."""
    figures, classes = Output(_CHARTS, "figure"), Output({"card": ALL}, "className")

    @app.callback(
        Output("charts", "children"),
        Output("opened", "data"),
        Output("shown", "data", allow_duplicate=True),
        {"tab": Input("tab", "value"), **_of(State, but=["tab"])},
        prevent_initial_call="initial_duplicate",
    )
    def show_tab(**wanted: Any) -> Any:
        asked = _asked(**wanted)
        shown = desk.word(asked)
        return page.chart_cards(desk.draw(asked, names=first_names(asked.tab))), asked.tab, shown

    @app.callback(
        Output("charts", "children", allow_duplicate=True),
        {"opened": Input("opened", "data"), **_of(State)},
        prevent_initial_call=True,
    )
    def show_rest(opened: str, **wanted: Any) -> Any:
        asked = _asked(**wanted)
        if asked.tab != opened:
            raise PreventUpdate
        first = first_names(asked.tab)
        names = [chart.name for chart in charts_of(asked.tab) if chart.name not in first]
        cards = Patch()
        cards.extend(page.chart_cards(desk.draw(asked, names=names)))
        return cards

    @app.callback(
        figures,
        classes,
        Output("urgent", "data"),
        Output("shown", "data"),
        Output("status", "children"),
        {
            "word": Input("word", "data"),
            "shown": State("shown", "data"),
            "tab": State("tab", "value"),
            **_of(Input, but=["tab"]),
        },
        prevent_initial_call=True,
    )
    def redraw(word: str, shown: str, **wanted: Any) -> Any:
        asked = _asked(**wanted)
        now = desk.word(asked)
        if now == shown and dash.ctx.triggered_id in ("focus", "node", "word"):
            raise PreventUpdate
        acted = asked.views.acted if dash.ctx.triggered_id == "views" else None
        urgent = [acted] if acted else first_names(asked.tab)[:1]
        return *_redraw(desk, asked, names=urgent), urgent, now, desk.status(asked)

    @app.callback(
        Output(_CHARTS, "figure", allow_duplicate=True),
        Output({"card": ALL}, "className", allow_duplicate=True),
        {"urgent": Input("urgent", "data"), **_of(State)},
        prevent_initial_call=True,
    )
    def redraw_rest(urgent: list[str], **wanted: Any) -> Any:
        asked = _asked(**wanted)
        names = [chart.name for chart in charts_of(asked.tab) if chart.name not in urgent]
        return _redraw(desk, asked, names=names)


def _redraw(desk: Desk, asked: Wanted, *, names: Sequence[str]) -> tuple[list[Any], list[Any]]:
    """Draw some charts, of those that the page has now; it may have gone to another tab."""
    there = [each["id"]["figure"] for each in dash.ctx.outputs_list[0]]
    drawn = {each.chart.name: each for each in desk.draw(asked, names=names)}
    return (
        [page.figure_of(drawn[name]) if name in drawn else dash.no_update for name in there],
        [page.card_class(drawn[name]) if name in drawn else dash.no_update for name in there],
    )


def _add_words(app: Dash, *, desk: Desk) -> None:
    @app.callback(
        Output("words", "children"),
        Output("focus", "options"),
        Output("focus", "value"),
        Output("node", "options"),
        Output("node", "value"),
        {
            "urgent": Input("urgent", "data"),
            "opened": Input("opened", "data"),
            **_of(State),
        },
        prevent_initial_call=True,
    )
    def tell(urgent: Any, opened: Any, **wanted: Any) -> Any:
        asked = _asked(**wanted)
        nodes, node, focus = desk.nodes(asked), desk.node(asked), desk.focus(asked)
        return (
            page.say(desk.tell(asked)),
            page.focus_options(asked.chosen),
            dash.no_update if focus == asked.focus else focus,
            nodes if len(nodes) > 1 else [],
            dash.no_update if node == asked.node else node,
        )
