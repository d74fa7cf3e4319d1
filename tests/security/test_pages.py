"""Text of samples that would act in a page, and pages that would load something from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from jinja2 import Environment

from diptych.datasets import PageDataset, TableDataset
from diptych.report import render as rendering
from tests.report.conftest import Finished, build
from tests.report.test_page import Page
from tests.report.test_page import render as draw_page
from tests.security.canary import Canary

ACTS = (
    "</script><script>alert('canary')</script>",
    '"><img src=x onerror="alert(\'canary\')">',
    "' onmouseover='alert(`canary`)",
    "<svg/onload=alert('canary')>",
    "<a href='javascript:alert(`canary`)'>canary</a>",
    "<iframe src='https://host.example/canary'></iframe>",
    "<link rel=stylesheet href='//host.example/canary.css'>",
    "{{ 7 * 191 }}{% raw %}",
)
LOADS = {"src", "href", "srcset", "data", "action", "formaction", "poster", "background"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return build(tmp_path_factory.mktemp("finished"), num_steps=20)


def with_text(finished: Finished, text: str) -> pa.Table:
    """Put a text into every place of a prediction that a sample, or a model, has filled."""
    table = finished.predictions
    for number, field in enumerate(table.schema):
        if field.type == pa.string() and field.name not in ("key", "unit", "split"):
            table = table.set_column(number, field, pa.array([text] * len(table), pa.string()))
    return table


def acting(page: Page, text: str) -> list[str]:
    """List what a browser would run or load for the sake of a text."""
    found = [f"{tag}: {name}" for tag, all_ in page.tags for name in all_ if name[:2] == "on"]
    for tag, attributes in page.tags:
        for name in LOADS & attributes.keys():
            if not (attributes[name] or "").startswith(("#", "data:image/")):
                found.append(f"{tag}: {name}={attributes[name]}")
    found += [
        body for attributes, body in page.scripts if not attributes.get("type") and "canary" in body
    ]
    return found + ["evaluated"] * ("1337" in text)


def unescaped() -> Environment:
    environment = real_environment()
    environment.autoescape = False
    return environment


real_environment = rendering._environment


@pytest.mark.parametrize("text", ACTS)
def test_text_of_samples_in_the_report(
    canary: Canary, finished: Finished, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"predictions": with_text(finished, text)}
    if "{{" in text:
        canary.shows(Environment().from_string(text.partition("{%")[0]).render() == "1337")
    elif text[0] == "<":
        with monkeypatch.context() as patch:
            patch.setattr(rendering, "_environment", unescaped)
            try:
                canary.shows(acting(draw_page(finished, **changes), ""))
            except AssertionError as error:
                # Where tags no longer close each other, the text has become part of the page.
                canary.shows("closes another element" in str(error))
    else:
        canary.shows(acting(Page(f'<p title="{text}">' + f"<p title='{text}'>"), ""))
    page = draw_page(finished, **changes)
    assert acting(page, page.text) == []
    assert "canary" in page.text or "191" in page.text


def test_a_page_runs_its_own_scripts_only(canary: Canary, finished: Finished) -> None:
    page = draw_page(finished)
    [policy] = [
        attributes["content"] or ""
        for tag, attributes in page.tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    allowed = dict(part.split(maxsplit=1) for part in policy.split("; "))
    canary.shows(len(page.scripts) > 2)
    digests = [
        f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'"
        for attributes, body in page.scripts
        if not attributes.get("type")
    ]
    assert allowed["script-src"].split() == digests
    assert allowed["default-src"] == "'none'"
    # These two do not follow from `default-src`.
    assert allowed["base-uri"] == allowed["form-action"] == "'none'"
    for directive in ("connect-src", "frame-src", "object-src", "font-src", "worker-src"):
        assert allowed.get(directive, "'none'") == "'none'"
    assert "unsafe-eval" not in policy
    assert "http" not in policy


def test_previews_of_tables_are_text(canary: Canary, tmp_path: Path) -> None:
    """What kedro-viz shows of a table is numbers and text, never markup."""
    dataset = TableDataset(filepath=str(tmp_path / "a.parquet"))
    dataset.save(pa.table({"text": list(ACTS), "number": list(range(len(ACTS)))}))
    canary.shows("<script>" in ACTS[0])
    preview: Any = dataset.preview()
    shown = json.loads(json.dumps(preview))
    assert [row[0] for row in shown["data"]] == list(ACTS)
    page = PageDataset(filepath=str(tmp_path / "a.html"))
    page.save("<p>ours</p>")
    assert page.preview() == "<p>ours</p>"
