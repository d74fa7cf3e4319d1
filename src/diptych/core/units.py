"""Numbers as a person reads them: bytes, seconds, counts."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """Write bytes in binary units, as '3.2 GiB'."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable: the last unit always returns")


def format_seconds(seconds: float) -> str:
    """Write a duration as '4.2 s', '3 min 05 s' or '2 h 04 min'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def format_count(count: float) -> str:
    """Write a count as '950', '1.46 M' or '8.03 B'."""
    for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(count) >= size:
            return f"{count / size:.2f}{unit}"
    return f"{count:.0f}"
