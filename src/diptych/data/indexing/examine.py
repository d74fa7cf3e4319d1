"""Look at one raw row and its images: what can be used has its facts written down.

In: rows of one source. Out: for each an `Examined`, or `Refused` with the reason. Images are read
and hashed; they are decoded only where that is asked for. Knows nothing of other rows.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from diptych.core.hashing import xxh3_bytes
from diptych.core.records import RawSource, Section
from diptych.data.content import hash_json, turns_json
from diptych.data.images.decode import decode
from diptych.data.images.headers import MAX_AREA_PX, ImageHeader, check_area, read_header
from diptych.data.reasons import Refused
from diptych.data.sources.blobs import Blob, BlobReader
from diptych.data.sources.row import RawRow
from diptych.data.sources.rows import parse

_MAX_REMEMBERED = 100_000


class IndexParams(Section):
    """What an image may be, how much may be refused before the run stops, and who is left out.

    `verify: decode` decodes every image, `header` reads only its header. `duplicates: drop` keeps
    the first of several samples with the same messages and images. `leakage: images` refuses a
    held-out sample that shares any image with a training sample, `content` one that is the same in
    all. `num_processes` is one per core if not given; it changes no byte of the result.
    """

    max_image_area_px: int = Field(default=80_000_000, ge=1, le=MAX_AREA_PX)
    max_image_bytes: int = Field(default=256 * 1024**2, ge=1)
    max_text_bytes: int = Field(default=1024**2, ge=1)
    min_side_px: int = Field(default=1, ge=1)
    max_aspect: float = Field(default=200.0, ge=1, le=200)
    max_quarantined_fraction: float = Field(default=0.01, ge=0, le=1)
    verify: Literal["header", "decode"] = "header"
    duplicates: Literal["drop", "keep"] = "drop"
    leakage: Literal["images", "content"] = "images"
    num_processes: int | None = Field(default=None, ge=1)


class Seen(NamedTuple):
    """One image: where its bytes are, what its header says, and the hash of its bytes."""

    name: str
    file: str
    offset: int
    length: int
    format: str
    width_px: int
    height_px: int
    hash: str


class Examined(NamedTuple):
    """One usable row.

    `label` is its place in its part, `key` starts with the source's name, `messages` is JSON text.
    """

    label: str
    key: str
    messages: str
    text_bytes: int
    content_hash: str
    kinds: tuple[str, ...]
    images: tuple[Seen, ...]


class Examiner:
    """Examines the rows of one source; each image file is read once however many rows name it."""

    def __init__(self, source: RawSource, *, params: IndexParams) -> None:
        self._name = source.name
        self._params = params
        self._max_bytes = params.max_image_bytes
        self._verifies = params.verify == "decode"
        self._reader = BlobReader(source, max_bytes=params.max_image_bytes)
        self._seen: dict[tuple[str, int, int], Seen | Refused] = {}

    def examine(self, raw: RawRow) -> Examined:
        """Check one row.

        Raises:
            Refused: It cannot be used; where an image is the reason, `blob` says which.
        """
        label, _, blobs = raw
        id_, turns, image_paths, kinds = parse(raw.value)
        text_bytes = sum([len(text) if text.isascii() else len(text.encode()) for _, text in turns])
        if text_bytes > self._params.max_text_bytes:
            raise Refused(
                "too_much_text",
                detail=f"The messages have {text_bytes:,} bytes, allowed are "
                f"{self._params.max_text_bytes:,}",
                value=str(text_bytes),
            )
        if blobs is None:
            blobs = [Blob(path, path) for path in image_paths]
        images = tuple([self._look(blob, place=place) for place, blob in enumerate(blobs)])
        messages = turns_json(turns)
        return Examined(
            label,
            f"{self._name}/{id_ or label}",
            messages,
            text_bytes,
            hash_json(messages, image_hashes=[image.hash for image in images]),
            kinds,
            images,
        )

    def _look(self, blob: Blob, *, place: int) -> Seen:
        if blob.data is not None:
            return self._read(blob, place=place)
        id_ = (blob.file, blob.offset, place if blob.offset >= 0 else 0)
        found = self._seen.get(id_)
        if found is None:
            try:
                found = self._read(blob, place=place)
            except Refused as error:
                found = error
            if len(self._seen) == _MAX_REMEMBERED:
                self._seen.clear()
            self._seen[id_] = found
        if isinstance(found, Refused):
            raise found
        return found

    def _read(self, blob: Blob, *, place: int) -> Seen:
        """Read an image and what it is; a refusal says where it lies."""
        name, file, offset = blob.name, blob.file, blob.offset
        try:
            data = blob.data
            if data is None:
                _check_bytes(blob.length, allowed=self._max_bytes)
                data = self._reader.read(file=file, offset=offset, length=blob.length, place=place)
            if not isinstance(data, bytes):
                data = bytes(data)
            num_bytes = len(data)
            _check_bytes(num_bytes, allowed=self._max_bytes)
            header = read_header(data)
            _check_shape(header, params=self._params)
            if self._verifies:
                decode(data, max_area_px=self._params.max_image_area_px)
        except Refused as error:
            error.image_path, error.image_file, error.image_offset = name, file, offset
            error.image_length = blob.length if blob.length >= 0 else None
            error.value = error.value or name
            raise
        width_px, height_px, format, *_ = header
        return Seen(name, file, offset, num_bytes, format, width_px, height_px, xxh3_bytes(data))


def _check_bytes(num_bytes: int, *, allowed: int) -> None:
    if num_bytes > allowed:
        raise Refused(
            "too_many_bytes",
            detail=f"The image has {num_bytes:,} bytes, allowed are {allowed:,}",
            value=str(num_bytes),
        )


def _check_shape(header: ImageHeader, *, params: IndexParams) -> None:
    check_area(header, max_area_px=params.max_image_area_px)
    width_px, height_px = header.width_px, header.height_px
    short, long = (width_px, height_px) if width_px < height_px else (height_px, width_px)
    if short < params.min_side_px:
        raise Refused(
            "too_small",
            detail=f"A side of {short} px is shorter than {params.min_side_px} px",
            value=f"{width_px}x{height_px}",
        )
    if long > params.max_aspect * short:
        raise Refused(
            "extreme_aspect",
            detail=f"One side is more than {params.max_aspect:g} times the other",
            value=f"{width_px}x{height_px}",
        )
