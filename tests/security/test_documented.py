"""`docs/security.md` says what the tests here show: every one is in its table of threats."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from diptych.core.floors import FLOORS
from tests.security.canary import Canary

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "security.md").read_text()


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_threat_is_in_the_table(canary: Canary) -> None:
    named = set(re.findall(r"`(test_\w+)`", DOCUMENT))
    here = [path for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)]
    written = set().union(*(names_in(path) for path in here))
    canary.shows(len(written) > 30)
    assert written - named == set(), "not in docs/security.md"
    elsewhere = dict(re.findall(r"`(test_\w+)` \(`(tests/[\w/]+\.py)`\)", DOCUMENT))
    assert named - written == set(elsewhere), "docs/security.md names tests that are not here"
    for name, path in elsewhere.items():
        assert name in names_in(ROOT / path)


def test_the_floors_are_in_the_table(canary: Canary) -> None:
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| (.+) \|$", DOCUMENT, flags=re.MULTILINE)
    canary.shows(rows)
    assert rows == [(floor.package, floor.version, floor.hole) for floor in FLOORS]
