"""The document's table has every case and every cell; it is written by `--write-tables`."""

from __future__ import annotations

from tests.families.cases import CASES
from tests.families.table import lines, listed


def test_the_document_lists_every_case():
    assert listed() == lines(CASES), "run `pytest tests/families --write-tables`"
