from __future__ import annotations

import pytest

from diptych.core.units import format_bytes, format_count, format_seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (80 * 2**30, "80.0 GiB")],
)
def test_bytes(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(4.21, "4.2 s"), (185, "3 min 05 s"), (7440, "2 h 04 min")]
)
def test_seconds(value, text):
    assert format_seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(950, "950"), (2230272, "2.23 M"), (8.03e9, "8.03 B"), (1500, "1.50 k")],
)
def test_counts(value, text):
    assert format_count(value) == text
