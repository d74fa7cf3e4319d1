"""In: the quarantine and where its images lie. Out: the refused rows per reason, with pictures.

A picture is shown where the image can be decoded within the page's bounds; whatever fails shows
none, for the table must never fail on the very data that was refused.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from diptych.core.errors import DiptychError
from diptych.core.records import Manifest, RawSamples
from diptych.data.reasons import REASONS
from diptych.data.sources.blobs import BlobReader
from diptych.report.pictures import thumbnail

MAX_PER_REASON = 4


@dataclass(frozen=True)
class RefusedExample:
    """One refused row; `picture` is a data URI, or None."""

    key: str
    value: str
    detail: str
    picture: str | None


@dataclass(frozen=True)
class Refusals:
    """All rows refused for one reason, by source, and a few of them."""

    reason: str
    sentence: str
    count: int
    by_source: tuple[tuple[str, int], ...]
    examples: tuple[RefusedExample, ...]


def show_refused(
    quarantine: pa.Table, *, manifest: Manifest, raw_samples: RawSamples
) -> list[Refusals]:
    """Count the refused rows per reason, the most frequent first, each with a few examples.

    Args:
        quarantine: the columns of `QUARANTINE`.
        manifest: has the counts.
        raw_samples: where the sources' images are.
    """
    readers = {source.name: BlobReader(source) for source in raw_samples.sources}
    totals: Counter[str] = Counter()
    for reasons in manifest.quarantined.values():
        totals.update(reasons)
    shown = []
    for reason, count in sorted(totals.items(), key=lambda item: (-item[1], item[0])):
        rows = quarantine.filter(pc.field("reason") == reason).slice(0, MAX_PER_REASON)
        by_source = tuple(
            (source, reasons[reason])
            for source, reasons in manifest.quarantined.items()
            if reason in reasons
        )
        examples = tuple(_show(row, readers=readers) for row in rows.to_pylist())
        shown.append(Refusals(reason, REASONS.get(reason, ""), count, by_source, examples))
    return shown


def _show(row: dict[str, Any], *, readers: dict[str, BlobReader]) -> RefusedExample:
    picture = None
    reader = readers.get(row["source"])
    if reader is not None and row["image_file"] is not None:
        picture = _picture(row, reader=reader)
    return RefusedExample(row["key"], row["value"] or "", row["detail"] or "", picture)


def _picture(row: dict[str, Any], *, reader: BlobReader) -> str | None:
    try:
        data = reader.read(
            file=row["image_file"],
            offset=-1 if row["image_offset"] is None else row["image_offset"],
            length=-1 if row["image_length"] is None else row["image_length"],
            place=0,
        )
        return thumbnail(data)
    except (DiptychError, OSError, ValueError):
        return None
