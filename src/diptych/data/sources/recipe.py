"""Make a row of the members that share a key in a WebDataset tar.

In: members by field, and which field holds what. Out: a row's value, as `rows.parse` understands
it, and where its images lie. Nothing is loaded but images' bytes, JSON and text, each bounded.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from typing import Any

from diptych.data.reasons import Refused
from diptych.data.sources.blobs import Blob
from diptych.data.sources.members import Member
from diptych.data.sources.row import MAX_ROW_BYTES
from diptych.data.sources.rows import read_image_paths, show
from diptych.data.sources.tools import FIELDS
from diptych.data.sources.turns import make_value

_IMAGES = frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff"})
_TEXTS = ("txt", "caption", "text")
_IMAGE_COLUMNS = ("image", "images")
_EAGER_BYTES = 16 * 1024**2
"""Images up to this size are read with their row; of larger ones only the place is given."""
_BOM = b"\xef\xbb\xbf"
_STEP = re.compile(r"\[([^\[\]]+)\]")
_UNREAD = object()
_DECODER = json.JSONDecoder()
_NUMBERED = re.compile(r"([0-9]{1,9})\.[a-z]+")


class Recipe:
    """How the members of a key become a row.

    Without `columns`, a JSON member with a conversation is the sample; else a text member is the
    caption of the images. `columns` names the members instead: each a field as `jpg`, several as
    `jpg,png` (images: all of them; texts: the first that is there), or a place in the JSON member
    as `json[answers][0]`. `prompt` is what the user asks for a caption.
    """

    def __init__(self, columns: dict[str, str], *, prompt: str | None) -> None:
        spellings = [columns[name] for name in _IMAGE_COLUMNS if name in columns]
        self._images = _names(",".join(spellings)) if spellings else None
        self._fields = {
            name: place for name, place in columns.items() if name not in _IMAGE_COLUMNS
        }
        self._image_fields: set[str] = set()  # those that were seen
        self._prompt = prompt
        self._taken = {
            name.partition("[")[0] for place in self._fields.values() for name in _names(place)
        }

    def takes(self, extension: str) -> bool:
        """Tell whether a member of this field can be part of a sample; ask before `make`."""
        if self._is_image(extension):
            self._image_fields.add(extension)
            return True
        plain = extension.removesuffix(".gz")
        if self._taken:
            return plain in self._taken
        return plain == "json" or plain in _TEXTS

    def make(
        self, members: dict[str, Member], *, file: int, path: str
    ) -> tuple[dict[str, Any], tuple[Blob, ...]]:
        """Make a row's value and its images from a key's members.

        Raises:
            Refused: A text cannot be read, or there is none.
        """
        images = self._order([name for name in members if name in self._image_fields])
        documents = _Documents(members, file=file)
        if self._fields:
            fields = {name: documents.look(place) for name, place in self._fields.items()}
            fields |= _tools(documents, places=self._fields)
            value = self._from_fields(fields, images=[members[image].name for image in images])
        else:
            value, images = self._by_default(documents, images=images)
        return value, tuple([_blob(members[image], file=file, path=path) for image in images])

    def _is_image(self, extension: str) -> bool:
        if self._images is not None:
            return extension in self._images
        return extension.rpartition(".")[2] in _IMAGES

    def _order(self, images: list[str]) -> list[str]:
        """Sort by the number before the format where every image has one; 10.jpg is after 9.jpg."""
        if len(images) < 2:
            return images
        numbers = [_NUMBERED.fullmatch(name) for name in images]
        if all(numbers):
            return sorted(images, key=lambda name: (int(name.partition(".")[0]), name))
        if self._images is not None:
            return sorted(images, key=self._images.index)
        return images

    def _by_default(
        self, documents: _Documents, *, images: list[str]
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the value and its images: a conversation of the JSON member, or a caption."""
        document = documents.json
        if isinstance(document, dict) and ("conversations" in document or "messages" in document):
            return _from_document(document, images=images, members=documents.members)
        texts = (documents.text(name) for name in _TEXTS)
        caption = next((text for text in texts if text is not None), None)
        if caption is None and isinstance(document, dict):
            caption = document.get("caption")
        if caption is None:
            raise Refused(
                "malformed_row",
                detail="The sample has no conversation in a JSON member and no text member",
                value=", ".join(documents.members),
            )
        names = [documents.members[image].name for image in images]
        return self._from_fields({"caption": caption}, images=names), images

    def _from_fields(self, fields: dict[str, Any], *, images: list[str]) -> dict[str, Any]:
        if not images and "caption" in fields:
            raise Refused("missing_image", detail="The sample has a caption, but no image")
        return make_value(fields, images=images, prompt=self._prompt)


def _tools(documents: _Documents, *, places: dict[str, str]) -> dict[str, Any]:
    """Return the tools beside turns that are a field of the JSON member."""
    turns = places.get("conversations") or places.get("messages") or ""
    if not turns.startswith("json[") or not isinstance(documents.json, dict):
        return {}
    return {name: documents.json[name] for name in FIELDS if name in documents.json}


def _from_document(
    document: dict[str, Any], *, images: list[str], members: dict[str, Member]
) -> tuple[dict[str, Any], list[str]]:
    """Order the images as the conversation names them, where every name is that of a member."""
    value = dict(document)
    listed = value.pop("images", None)
    value.pop("image", None)
    named = _named_images(value)
    listed = named or listed
    if len(images) > 1 and isinstance(listed, list | tuple):
        by_name = {members[image].name.rpartition("/")[2]: image for image in images}
        by_name |= {image: image for image in images}
        names = [name.rpartition("/")[2] for name in listed if isinstance(name, str)]
        if len(names) == len(listed) and names and all(name in by_name for name in names):
            images = [by_name[name] for name in names]
    if not named:
        value["images"] = [members[image].name for image in images]
    return value, images


def _named_images(value: dict[str, Any]) -> tuple[str, ...]:
    """Return the images that turns name, which those do whose content is a list of parts."""
    turns = value.get("conversations") or value.get("messages")
    if not isinstance(turns, list):
        return ()
    for turn in turns:
        if isinstance(turn, dict) and isinstance(turn.get("content", turn.get("value")), list):
            return read_image_paths(value)
    return ()


class _Documents:
    """The text members of one key, read when they are asked for."""

    def __init__(self, members: dict[str, Member], *, file: int) -> None:
        self.members = members
        self._file = file
        self._value: Any = _UNREAD

    @property
    def json(self) -> Any:
        """The JSON member's value; None where there is no such member."""
        if self._value is _UNREAD:
            self._value = self._read_json()
        return self._value

    def _read_json(self) -> Any:
        text = self._read("json")
        if text is None:
            return None
        try:
            return _load(text.removeprefix(_BOM).decode())
        except (ValueError, RecursionError) as error:
            raise Refused(
                "malformed_json", detail=f"The JSON member: {error}", value=repr(text[:100])
            ) from error

    def text(self, name: str) -> str | None:
        """Return a text member; None where there is no such member."""
        data = self._read(name)
        if data is None:
            return None
        try:
            return data.removeprefix(_BOM).decode().strip()
        except UnicodeDecodeError as error:
            raise Refused(
                "malformed_row", detail=f"The text is not UTF-8: {error}", value=repr(data[:100])
            ) from error

    def look(self, place: str) -> Any:
        """Return what a column names: a text member, or a place in the JSON member."""
        if place == "json" or place.startswith("json["):
            value = self.json
            for step in _STEP.findall(place):
                try:
                    value = value[int(step)] if isinstance(value, list) else value[step]
                except (LookupError, TypeError, ValueError) as error:
                    raise Refused(
                        "malformed_row",
                        detail=f"The JSON member has nothing at '{place}'",
                        value=show(value),
                    ) from error
            return value
        for name in _names(place):
            if (text := self.text(name)) is not None:
                return text
        raise Refused(
            "malformed_row",
            detail=f"The sample has no member '{place}'",
            value=", ".join(self.members),
        )

    def _read(self, name: str) -> bytes | None:
        member, is_packed = self.members.get(name), False
        if member is None:
            member, is_packed = self.members.get(f"{name}.gz"), True
        if member is None:
            return None
        if member.length > MAX_ROW_BYTES:
            raise _too_long(name, num_bytes=member.length)
        data = member.data
        if data is None:
            data = os.pread(self._file, member.length, member.offset)
        return _unpack(data, name=name) if is_packed else data


def _load(text: str) -> Any:
    """Parse JSON: as `json.loads`, of which half the time goes into looking for spaces around."""
    if text[:1] == "{":
        value, end = _DECODER.raw_decode(text)
        if end == len(text):
            return value
    return json.loads(text)


def _unpack(data: bytes, *, name: str) -> bytes:
    """Gunzip, but never to more than a text may have."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        text = unpacker.decompress(data, MAX_ROW_BYTES)
    except zlib.error as error:
        raise Refused("malformed_row", detail=f"'{name}.gz' is damaged: {error}") from error
    if unpacker.unconsumed_tail:
        raise _too_long(name, num_bytes=MAX_ROW_BYTES + 1)
    if not unpacker.eof:
        raise Refused("malformed_row", detail=f"'{name}.gz' ends too early")
    return text


def _too_long(name: str, *, num_bytes: int) -> Refused:
    return Refused(
        "row_too_long",
        detail=f"'{name}' has {num_bytes:,} bytes or more, allowed are {MAX_ROW_BYTES:,}",
        value=str(num_bytes),
    )


def _blob(member: Member, *, file: int, path: str) -> Blob:
    name, offset, length, _, data = member
    if length > _EAGER_BYTES:
        data = None
    elif data is None:
        data = os.pread(file, length, offset)
    return Blob(name, path, offset, length, data)


def _names(place: str) -> list[str]:
    return [name.strip().lower() for name in re.split("[,;]", place)]
