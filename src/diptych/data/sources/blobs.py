"""Where the bytes of an image lie, and reading them there.

In: a file of the source, an offset and which image of the sample it is. Out: bytes, or `Refused`
with the reason. With no offset the file is the image, below the source's folder of images; with one
it is a part of the source: a byte of a tar or of a file of JSON lines, or the row of a Parquet
file. Knows nothing of pixels.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass

from diptych.core.records import RawSource
from diptych.data.files.store import ChangedFile, MissingFile, PathEscapes, Store
from diptych.data.reasons import Refused
from diptych.data.sources.cells import Cells
from diptych.data.sources.rows import BY_ADDRESS, FETCHED, read_image_paths

MAX_IMAGE_BYTES = 1 << 30
_MAX_LINE_BYTES = 64 << 20
_READ_AHEAD_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Blob:
    """Where an image's bytes lie; see this module for `offset`.

    `name` is what the source calls it, `length` its bytes (-1: not known yet), `data` the bytes
    themselves where reading the row gave them anyway.
    """

    name: str
    file: str
    offset: int = -1
    length: int = -1
    data: bytes | memoryview | None = None


class BlobReader:
    """Reads the images of one source; keeps the last open file, row group or block."""

    def __init__(self, source: RawSource, *, max_bytes: int = MAX_IMAGE_BYTES) -> None:
        self._source = source
        self._max_bytes = max_bytes
        self._images = Store(source.images)
        self._parts = Store(source.root, links="follow")
        self._block: tuple[str, int, bytes] | None = None
        self._cells: Cells | None = None

    def read(self, *, file: str, offset: int, length: int, place: int) -> bytes:
        """Read one image.

        Args:
            file: Where its bytes lie, as `Blob.file`.
            offset: As `Blob.offset`.
            length: Bytes, as `Blob.length`.
            place: Which image of its sample it is, from 0.

        Raises:
            Refused: It is not there, leaves the folder, is too large or cannot be read.
            DataError: The server cannot be reached or refuses.
        """
        try:
            if offset < 0:
                return self._read_whole(file)
            if self._source.kind == "parquet":
                return self._read_cell(file, row=offset, place=place)
            if self._source.kind == "llava":
                return self._read_inline(file, offset=offset, place=place)
            return self._read_range(file, offset=offset, length=length)
        except PathEscapes as error:
            raise Refused("path_escapes", detail=error.found, value=file) from error
        except MissingFile as error:
            raise Refused("missing_image", detail=error.found, value=file) from error
        except ChangedFile as error:
            raise Refused("unreadable_image", detail=error.found, value=file) from error

    def _read_whole(self, file: str) -> bytes:
        if file.startswith(FETCHED):
            return self._fetch(file)
        num_bytes = self._images.stat(file).num_bytes
        self._check_length(num_bytes)
        return self._images.read_range(file, offset=0, length=num_bytes) if num_bytes else b""

    def _fetch(self, url: str) -> bytes:
        if self._source.image_urls == "refuse":
            cure = f"; or set image_urls of the source '{self._source.name}' to fetch"
            raise Refused("path_escapes", detail=BY_ADDRESS + cure, value=url)
        from diptych.data.files.fetch import fetch  # aiohttp, which local files need not wait for

        return fetch(url, max_bytes=self._max_bytes)

    def _read_range(self, file: str, *, offset: int, length: int) -> bytes:
        self._check_length(length)
        if self._parts.local(file) is not None:
            return self._parts.read_range(file, offset=offset, length=length)
        name, start, data = self._block or ("", 0, b"")
        if name != file or not start <= offset <= offset + length <= start + len(data):
            num_bytes = self._parts.stat(file).num_bytes
            ahead = min(max(length, _READ_AHEAD_BYTES), max(length, num_bytes - offset))
            start, data = offset, self._parts.read_range(file, offset=offset, length=ahead)
            self._block = (file, start, data)
        return data[offset - start : offset - start + length]

    def _read_inline(self, file: str, *, offset: int, place: int) -> bytes:
        with self._parts.open(file) as lines:
            lines.seek(offset)
            line = lines.readline(_MAX_LINE_BYTES + 1)
        try:
            image = read_image_paths(json.loads(line.decode("utf-8-sig")))[place]
        except (ValueError, IndexError, RecursionError) as error:
            raise ChangedFile(f"'{file}' has changed: no image at byte {offset}") from error
        return read_inline(image)

    def _read_cell(self, file: str, *, row: int, place: int) -> bytes:
        if self._cells is None or self._cells.file != file:
            self._cells = Cells(self._parts, file=file, columns=self._source.columns)
        data = self._cells.read(row, place=place)
        self._check_length(len(data))
        return data

    def _check_length(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise Refused(
                "too_many_bytes",
                detail=f"The image has {num_bytes:,} bytes, allowed are {self._max_bytes:,}",
                value=str(num_bytes),
            )


def is_inline(image: str) -> bool:
    """Tell whether an image is given by its bytes, as a `data:` address."""
    return image.startswith("data:")


def read_inline(image: str) -> bytes:
    """Decode a `data:` address.

    Raises:
        Refused: It is not base64.
    """
    head, comma, body = image.partition(",")
    if not comma or not head.endswith(";base64"):
        raise Refused(
            "unreadable_image", detail="A 'data:' image is not in base64", value=image[:80]
        )
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(
            "unreadable_image", detail=f"A 'data:' image is not base64: {error}", value=image[:80]
        ) from error
