"""Find raw samples and read their rows one by one; what is in a row is `rows.py`'s business.

In: the parameters' sources (LLaVA JSON or JSONL with a folder of images, or the starter data, which
is built here if it is missing). Out: `raw_samples`, and for each source an iterator of rows and of
refusals, so that one bad line stops nothing. Knows nothing of conversations or pixels.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from diptych.core.errors import ConfigError, DataError, nearest
from diptych.core.hashing import sha256_file
from diptych.core.records import RawSamples, RawSource, Section

_SAFE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_JSONL_SUFFIXES = (".jsonl", ".ndjson")
_MAX_VALUE_CHARS = 200


class SourceParams(Section):
    """One source of raw samples.

    `path` is the annotation file (for `starter`, the folder to build in); `images` is the folder
    that image paths are relative to, by default the one `path` is in. `split` puts every sample
    into one split; without it `heldout_fraction` of the samples are held out, chosen by the content
    of their images, so that no image is in both splits.
    """

    kind: Literal["starter", "llava"] = "starter"
    path: str = "data/01_raw/starter"
    images: str | None = None
    split: Literal["train", "heldout"] | None = None
    heldout_fraction: float = Field(default=0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _fits_together(self) -> SourceParams:
        if self.kind == "llava" and "path" not in self.model_fields_set:
            raise ValueError("a source of kind 'llava' needs 'path', its annotation file")
        if self.split is not None and self.heldout_fraction:
            raise ValueError("'split' and 'heldout_fraction' exclude each other: give one")
        if self.kind == "starter" and (self.images or self.split or self.heldout_fraction):
            raise ValueError("the starter data bring their own images and splits: give only 'path'")
        return self


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as it was read; `label` names its place, as 'line-12' or 'row-3'."""

    label: str
    value: Any


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that could not be read; `reason` is a code of `REASONS`."""

    label: str
    reason: str
    value: str
    detail: str


def gather(sources: dict[str, SourceParams]) -> RawSamples:
    """Find every source's files and digest them; build the starter data where they are missing.

    Args:
        sources: By name, which is the first part of each sample's key.

    Returns:
        One entry per annotation file.

    Raises:
        ConfigError: There is no source, or a name is unsafe in file names.
        DataError: A path is not there; the message names the nearest that is.
    """
    if not sources:
        raise ConfigError(
            "No source of samples is given",
            cure="Name at least one under 'sources' in the parameters of prepare",
        )
    found: list[RawSource] = []
    for name, params in sources.items():
        if not _SAFE_NAME.fullmatch(name):
            raise ConfigError(
                f"A source cannot be named '{name}'",
                allowed="Allowed: lower-case letters, digits, '-' and '_', at most 64",
            )
        found += _starter(name, params) if params.kind == "starter" else [_llava(name, params)]
    return RawSamples(sources=tuple(found))


def read_source(source: RawSource) -> Iterator[RawRow | Refusal]:
    """Read an annotation file's rows in order.

    A file whose name ends in `.jsonl` or `.ndjson`, or whose text does not start with `[`, is read
    line by line, and a bad line is refused alone. So is an array that has one row a line.

    Raises:
        DataError: The file is an array that is not valid JSON, laid out in another way.
    """
    path = Path(source.annotations)
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        file.seek(0)
        if path.suffix.lower() in _JSONL_SUFFIXES or not start.startswith(b"["):
            yield from _read_lines(file)
            return
        content = file.read()
    try:
        rows = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        yield from _recover(content.splitlines(), path=path, error=error)
        return
    for number, value in enumerate(rows, start=1):
        yield RawRow(label=f"row-{number}", value=value)


def _starter(name: str, params: SourceParams) -> list[RawSource]:
    from diptych.data.starter import build_starter, is_starter

    folder = Path(params.path)
    if not is_starter(folder):
        others = [path for path in folder.glob("*") if path.name not in ("images", ".gitkeep")]
        if others:
            raise DataError(
                f"'{folder}' holds no starter data but other files, such as '{others[0].name}'",
                allowed="The starter data are built in an empty or a new folder",
                cure="Name another folder, or use kind 'llava' for your own samples",
            )
        build_starter(folder)
    return [
        _digest(name, annotations=folder / f"{split}.json", images=folder, split=split)
        for split in ("train", "heldout")
    ]


def _llava(name: str, params: SourceParams) -> RawSource:
    annotations = _existing(Path(params.path), what="annotation file", source=name)
    if not annotations.is_file():
        raise DataError(
            f"The annotations of source '{name}' are not a file: '{annotations}'",
            allowed="Allowed: a JSON array or JSONL file in LLaVA's form",
        )
    folder = Path(params.images) if params.images is not None else annotations.parent
    images = _existing(folder, what="image folder", source=name)
    return _digest(
        name,
        annotations=annotations,
        images=images,
        split=params.split,
        heldout_fraction=params.heldout_fraction,
    )


def _digest(
    name: str,
    *,
    annotations: Path,
    images: Path,
    split: Literal["train", "heldout"] | None,
    heldout_fraction: float = 0.0,
) -> RawSource:
    listing_sha256, num_image_files = _list_files(images)
    return RawSource(
        name=name,
        kind="llava",
        split=split,
        heldout_fraction=heldout_fraction,
        annotations=annotations.as_posix(),
        images=images.as_posix(),
        annotations_sha256=sha256_file(annotations),
        listing_sha256=listing_sha256,
        num_image_files=num_image_files,
    )


def _list_files(folder: Path) -> tuple[str, int]:
    """Hash (relative path, size, time) of every file below a folder; cheap, nothing is read."""
    entries: list[tuple[str, int, int]] = []
    pending = [""]
    while pending:
        below = pending.pop()
        with os.scandir(folder / below) as listing:
            for entry in listing:
                path = f"{below}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    pending.append(f"{path}/")
                else:
                    status = entry.stat(follow_symlinks=False)
                    entries.append((path, status.st_size, status.st_mtime_ns))
    digest = hashlib.sha256()
    for entry in sorted(entries):
        digest.update(repr(entry).encode())
    return digest.hexdigest(), len(entries)


def _existing(path: Path, *, what: str, source: str) -> Path:
    if path.exists():
        return path
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    missing = path.relative_to(parent).parts[0]
    hint = nearest(missing, allowed=sorted(entry.name for entry in parent.iterdir())[:20])
    raise DataError(
        f"The {what} of source '{source}' is not there: '{path}' (in '{parent}' there is no "
        f"'{missing}')",
        allowed=hint,
        cure="Correct the path; it is relative to the project's folder",
    )


def _read_lines(lines: Iterator[bytes] | Any) -> Iterator[RawRow | Refusal]:
    for number, line in enumerate(lines, start=1):
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if text.strip():
            yield _read_line(text, number=number)


def _read_line(text: bytes, *, number: int) -> RawRow | Refusal:
    try:
        return RawRow(label=f"line-{number}", value=json.loads(text.decode("utf-8")))
    except (ValueError, RecursionError) as error:
        return Refusal(
            label=f"line-{number}",
            reason="malformed_json",
            value=text.decode("utf-8", errors="replace").strip()[:_MAX_VALUE_CHARS],
            detail=f"Line {number} is not valid JSON: {error}",
        )


def _recover(
    lines: list[bytes], *, path: Path, error: ValueError | RecursionError
) -> Iterator[RawRow | Refusal]:
    """Read a broken array line by line, if at least half of its lines are whole rows."""
    found: list[RawRow | Refusal] = []
    for number, line in enumerate(lines, start=1):
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        text = text.strip().rstrip(b",")
        if number == 1:
            text = text.removeprefix(b"[")
        if number == len(lines):
            text = text.removesuffix(b"]")
        if text and text not in (b"[", b"]"):
            found.append(_read_line(text, number=number))
    whole = sum(isinstance(row, RawRow) and isinstance(row.value, dict) for row in found)
    if not whole or whole * 2 < len(found):
        raise DataError(
            f"'{path}' is not a valid JSON array: {error}",
            allowed="In an array with one row a line, or in JSONL, a bad line is set aside alone",
            cure="Correct the file there, or write it as JSONL",
        )
    yield from found
