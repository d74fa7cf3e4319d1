"""In: a template's name and what it shows. Out: one HTML page, or a part of one.

A page is one file without any link to the network: plotly's script (4.8 MB of it), the figures'
numbers and the images are inside, and its content security policy lets a browser load nothing else.
Everything that came from data is escaped.
"""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING, Any

from diptych.core.units import format_bytes, format_count, format_seconds
from diptych.report import tables
from diptych.report.attempts import when
from diptych.report.verdict import percent, tiny

if TYPE_CHECKING:
    from jinja2 import Environment


def render_page(template: str, *, context: dict[str, Any]) -> str:
    """Fill a page's template, with the style and the scripts that the page needs inside."""
    from plotly.offline import get_plotlyjs

    environment = _environment()
    scripts = {"plotly": get_plotlyjs(), "show": _source(environment, name="show.js")}
    return environment.get_template(template).render(
        **context,
        scripts=scripts,
        style=_source(environment, name="report.css"),
        script_hashes=[_integrity(text) for text in scripts.values()],
    )


def render_part(template: str, *, context: dict[str, Any]) -> str:
    """Fill the template of a part of a page."""
    return _environment().get_template(template).render(**context)


def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("diptych.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": format_bytes,
        "count": format_count,
        "seconds": lambda seconds: format_seconds(seconds).replace(" ", "\N{NO-BREAK SPACE}"),
        "moment": when,
        "percent": percent,
        "tiny": tiny,
        "layout": tables.name_layout,
        "visible": lambda text: text.replace("\n", "\N{RETURN SYMBOL}\n"),
    }
    return environment


def _source(environment: Environment, *, name: str) -> str:
    assert environment.loader is not None, "the environment is made with a loader"
    return environment.loader.get_source(environment, name)[0]


def _integrity(script: str) -> str:
    """Hash a script for the content security policy: no other script can run in the page."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
