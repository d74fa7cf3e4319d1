"""What reading a part yields: rows, and refusals where a row or a whole file cannot be read.

In: nothing. Out: the two records, and what all readers share. Knows nothing of any format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from diptych.core.records import RawPart, RawSource
from diptych.data.files.store import Store
from diptych.data.sources.blobs import Blob
from diptych.data.sources.rows import show

MAX_ROW_BYTES = 64 << 20
"""A longer row is refused without being held in memory; a longer file is cut or streamed."""


class RawRow(NamedTuple):
    """One row as it was read.

    `label` names its place, as 'line-12' or 'row-3', and makes its key where it has no id: no two
    rows of a source share one. `value` is what `rows.parse` understands. `blobs` says where the
    bytes of its images lie; None: they are paths in `value`.
    """

    label: str
    value: Any
    blobs: tuple[Blob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row or file that could not be read; `reason` is a code of `REASONS`."""

    label: str
    reason: str
    value: str
    detail: str


def refuse(label: str, *, reason: str, detail: str, value: object = "") -> Refusal:
    """Refuse a row; a long value is cut."""
    return Refusal(label=label, reason=reason, value=show(value), detail=detail)


def part_store(source: RawSource) -> Store:
    """Open the folder or URL of a source's parts, whose links are followed: a person named them."""
    return Store(source.root, links="follow")


def label_prefix(source: RawSource, *, part: RawPart) -> str:
    """Return what makes labels of one part unlike those of others; nothing for a single file."""
    single = len({source.parts[0].path, source.parts[-1].path}) == 1 if source.parts else True
    return "" if single else f"{part.path}:"


def or_empty(rows: Iterable[RawRow | Refusal], *, part: RawPart) -> Iterator[RawRow | Refusal]:
    """Pass on what was read; refuse the part where that was nothing."""
    found = False
    for row in rows:
        found = True
        yield row
    if not found and part.end is None:
        yield refuse(part.path, reason="empty_part", detail="The file holds no row")
