"""Look at every raw sample once: what can be used becomes an index, the rest is quarantined.

In: `raw_samples`. Out: `sample_index` and `quarantine` (columns in `core/tables.py`); every row
read is in exactly one of them. Image files are read and hashed, never decoded.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import Field

from diptych.core.errors import DataError
from diptych.core.files import inside
from diptych.core.hashing import canonical_json
from diptych.core.records import RawSamples, RawSource, Section
from diptych.core.tables import QUARANTINE, SAMPLE_INDEX
from diptych.data.content import content_sha256, dump_messages, sha256_bytes
from diptych.data.headers import MAX_AREA_PX, ImageHeader, check_area, read_header
from diptych.data.reasons import REASONS, Refused
from diptych.data.rows import parse, read_id
from diptych.data.sources import RawRow, Refusal, read_source
from diptych.data.splits import Claim, assign_splits

__all__ = ["REASONS", "IndexParams", "index"]

_MAX_VALUE_CHARS = 200
_EXAMPLES_PER_REASON = 3


class IndexParams(Section):
    """What an image may be, and how much may be refused before the run stops."""

    max_image_area_px: int = Field(default=80_000_000, ge=1, le=MAX_AREA_PX)
    max_image_bytes: int = Field(default=256 * 1024**2, ge=1)
    min_side_px: int = Field(default=1, ge=1)
    max_aspect: float = Field(default=200.0, ge=1, le=200)
    max_quarantined_fraction: float = Field(default=0.01, ge=0, le=1)


@dataclass(frozen=True, slots=True)
class _Seen:
    """One image file: its header and its content's hash."""

    header: ImageHeader
    sha256: str


def index(raw_samples: RawSamples, params: IndexParams) -> tuple[pa.Table, pa.Table]:
    """Check every raw sample.

    Args:
        raw_samples: The sources.
        params: Limits.

    Returns:
        `sample_index`, in the order of the sources, and `quarantine`.

    Raises:
        DataError: More than `max_quarantined_fraction` of the samples were refused (the message
            counts the reasons and gives examples), or no sample is left.
    """
    rows: list[dict[str, Any]] = []
    claims: list[Claim] = []
    refused: list[dict[str, Any]] = []
    keys: set[str] = set()
    for source in raw_samples.sources:
        images = _Images(Path(source.images), params=params)
        for raw in read_source(source):
            try:
                row, claim = _examine(raw, source=source, images=images, keys=keys)
            except Refused as error:
                refused.append(_quarantine_row(raw, source=source, error=error))
                continue
            keys.add(row["key"])
            rows.append(row)
            claims.append(claim)
    for row, split in zip(rows, assign_splits(claims), strict=True):
        row["split"] = split
    rows, leaks = _separate_leaks(rows)
    refused += leaks
    _check_fraction(refused, num_ok=len(rows), allowed=params.max_quarantined_fraction)
    return (
        pa.Table.from_pylist(rows, schema=SAMPLE_INDEX),
        pa.Table.from_pylist(refused, schema=QUARANTINE),
    )


class _Images:
    """The image files of one source, each read once however many samples name it."""

    def __init__(self, folder: Path, *, params: IndexParams) -> None:
        self._folder = folder
        self._params = params
        self._seen: dict[str, _Seen | Refused] = {}

    def look(self, path: str) -> _Seen:
        """Return an image's facts.

        Raises:
            Refused: It cannot be used.
        """
        found = self._seen.get(path)
        if found is None:
            try:
                found = self._read(path)
            except Refused as error:
                error.image_path = path
                error.value = error.value or path
                found = error
            self._seen[path] = found
        if isinstance(found, Refused):
            raise found
        return found

    def _read(self, path: str) -> _Seen:
        try:
            file = inside(path, folder=self._folder)
        except DataError as error:
            raise Refused("path_escapes", detail=error.found, value=path) from error
        except (OSError, RuntimeError) as error:
            raise Refused("missing_image", detail=f"No such file: {error}") from error
        data = _read_file(file, path=path, max_bytes=self._params.max_image_bytes)
        header = read_header(data)
        self._check_shape(header)
        return _Seen(header=header, sha256=sha256_bytes(data))

    def _check_shape(self, header: ImageHeader) -> None:
        check_area(header, max_area_px=self._params.max_image_area_px)
        short, long = sorted((header.width_px, header.height_px))
        size = f"{header.width_px}x{header.height_px}"
        if short < self._params.min_side_px:
            raise Refused(
                "too_small",
                detail=f"A side of {short} px is shorter than {self._params.min_side_px} px",
                value=size,
            )
        if long > self._params.max_aspect * short:
            raise Refused(
                "extreme_aspect",
                detail=f"One side is more than {self._params.max_aspect:g} times the other",
                value=size,
            )


def _read_file(file: Path, *, path: str, max_bytes: int) -> bytes:
    try:
        if not os.path.exists(file):  # unlike Path's, false for a name that is too long
            raise Refused("missing_image", detail=f"There is no file '{path}'")
        if not file.is_file():
            raise Refused("unreadable_image", detail=f"'{path}' is not a file")
        num_bytes = file.stat().st_size
        if num_bytes > max_bytes:
            raise Refused(
                "too_many_bytes",
                detail=f"The file has {num_bytes:,} bytes, allowed are {max_bytes:,}",
                value=str(num_bytes),
            )
        return file.read_bytes()
    except OSError as error:
        raise Refused("unreadable_image", detail=f"'{path}': {error.strerror}") from error


def _examine(
    raw: RawRow | Refusal, *, source: RawSource, images: _Images, keys: set[str]
) -> tuple[dict[str, Any], Claim]:
    """Check one row; the split is still open."""
    if isinstance(raw, Refusal):
        raise Refused(raw.reason, detail=raw.detail, value=raw.value)
    conversation = parse(raw.value)
    key = f"{source.name}/{conversation.id or raw.label}"
    if key in keys:
        raise Refused("duplicate_id", detail="An earlier row has the same id", value=key)
    seen = [images.look(path) for path in conversation.image_paths]
    messages = dump_messages(conversation.messages)
    image_sha256s = tuple(image.sha256 for image in seen)
    row = {
        "key": key,
        "source": source.name,
        "messages": canonical_json(messages),
        "kinds": list(conversation.kinds),
        "image_paths": list(conversation.image_paths),
        "image_formats": [image.header.format for image in seen],
        "widths_px": [image.header.width_px for image in seen],
        "heights_px": [image.header.height_px for image in seen],
        "text_bytes": sum(len(message["text"].encode()) for message in messages),
        "content_sha256": content_sha256(messages, image_sha256s=image_sha256s),
        "status": "ok",
    }
    claim = Claim(
        image_sha256s=image_sha256s,
        content_sha256=row["content_sha256"],
        split=source.split,
        heldout_fraction=source.heldout_fraction,
    )
    return row, claim


def _separate_leaks(
    rows: list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Part the held-out samples whose very content is in the training split from the rest."""
    trained = {row["content_sha256"]: row["key"] for row in rows if row["split"] == "train"}
    kept, leaks = [], []
    for row in rows:
        twin = trained.get(row["content_sha256"]) if row["split"] == "heldout" else None
        if twin is None:
            kept.append(row)
            continue
        leaks.append(
            {
                "key": row["key"],
                "source": row["source"],
                "reason": "leaks_into_train",
                "value": twin,
                "detail": f"The training sample '{twin}' has the same text and images",
                "image_path": row["image_paths"][0] if row["image_paths"] else None,
            }
        )
    return kept, leaks


def _quarantine_row(raw: RawRow | Refusal, *, source: RawSource, error: Refused) -> dict[str, Any]:
    name = read_id(raw.value) if isinstance(raw, RawRow) else None
    return {
        "key": f"{source.name}/{name or raw.label}",
        "source": source.name,
        "reason": error.reason,
        "value": _printable(error.value),
        "detail": f"{raw.label}: {_printable(error.detail)}",
        "image_path": error.image_path,
    }


def _printable(text: str) -> str:
    """Cut a value and replace what UTF-8 cannot hold."""
    return text[:_MAX_VALUE_CHARS].encode("utf-8", errors="replace").decode("utf-8")


def _check_fraction(refused: list[dict[str, Any]], *, num_ok: int, allowed: float) -> None:
    total = num_ok + len(refused)
    if num_ok and len(refused) <= allowed * total:
        return
    if not total:
        raise DataError(
            "The sources hold no sample", cure="Check the annotation files: they have no rows"
        )
    lines = [
        f"{len(refused):,} of {total:,} samples ({len(refused) / total:.1%}) cannot be used",
        *_reason_lines(refused),
    ]
    raise DataError(
        "\n".join(lines),
        allowed=f"Allowed: at most {allowed:.1%} (max_quarantined_fraction), and one usable sample",
        cure="Correct these samples, or raise prepare.index.max_quarantined_fraction",
    )


def _reason_lines(refused: Iterable[dict[str, Any]]) -> list[str]:
    refused = list(refused)
    lines = []
    for reason, count in Counter(row["reason"] for row in refused).most_common():
        lines.append(f"  {reason}: {count:,}. {REASONS[reason]}")
        examples = [row for row in refused if row["reason"] == reason][:_EXAMPLES_PER_REASON]
        lines += [f"    {row['key']}: {row['detail']} ({row['value']})" for row in examples]
    return lines
