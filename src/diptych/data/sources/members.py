"""Walk the headers of a tar: where each member's bytes lie. No member is read.

In: an open file. Out: a `Member` for each regular file, in the tar's order, and one without bytes
for what is never followed (links, devices). Plain USTAR, PAX and GNU long names are understood. A
header is three things: 512 bytes with a checksum, a type, and a size in octal or base 256; a PAX or
long-name header's content belongs to the member that follows. Knows nothing of samples.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from diptych.data.reasons import Refused

_BLOCK = 512
_WINDOW = 2048
"""Holds the headers of a member and, often, the text behind it with the next member's."""
_ZEROS = bytes(_BLOCK)
_MAX_NAME_BYTES = 1 << 20
_ADLER = 65_521
_SPACES = 8 * ord(" ")
_EXTRAS = frozenset(b"xgLK")
_GLOBAL = ord("g")
_REGULAR = frozenset(b"0\x007")
_UNFOLLOWED = {
    ord("1"): "a hard link",
    ord("2"): "a symbolic link",
    ord("3"): "a device",
    ord("4"): "a device",
    ord("6"): "a pipe",
    ord("S"): "a sparse file",
}
_FOLDER = ord("5")
_BARE = frozenset(b"12346")
"""Links, devices and pipes have no content, whatever their size says."""
_RECORD = re.compile(rb"([0-9]{1,7}) ([^=\n]{1,255})=")
_TIME = re.compile(rb"[0-9]{1,3} mtime=[0-9.]{1,40}\n")
"""All that webdataset's writer has to say of a member."""
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}


class Member(NamedTuple):
    """One file of a tar; `unfollowed` says what it is where it is no regular file.

    `data` is its content where that was asked for and read on the way.
    """

    name: str
    offset: int
    length: int
    unfollowed: str | None = None
    data: bytes | None = None


def walk_members(file: int, *, max_kept_bytes: int = 0) -> Iterator[Member]:
    """Yield the members of a tar in order.

    Args:
        file: A file descriptor; it is read by `os.pread`, so that a file that shrinks meanwhile
            ends the walk instead of the process.
        max_kept_bytes: How much may be kept of the small members' content, all together, that
            stands between the headers that are read here anyway.

    Raises:
        Refused: The tar is compressed, or from here on damaged or cut off; members that were
            yielded are whole.
    """
    end = os.fstat(file).st_size
    window, window_start = b"", 0
    position, num_members = 0, 0
    ended = False
    extra: dict[str, bytes] = {}
    while position < end:
        start = position - window_start
        if start < 0 or start + _BLOCK > len(window):
            window, window_start, start = os.pread(file, _WINDOW, position), position, 0
        header = window[start : start + _BLOCK]
        if header == _ZEROS:
            # Tars may be joined, each with its end mark: what stands behind one is read too.
            position, ended, extra = position + _BLOCK, True, {}
            continue
        if position == 0:
            _check_plain(header)
        if len(header) < _BLOCK:
            raise _cut_off(position, num_members=num_members)
        size = _read_size(header, position=position, num_members=num_members)
        ended, kind, content = False, header[156], position + _BLOCK
        if kind in _EXTRAS:
            position = content + -(-size // _BLOCK) * _BLOCK
            if kind != _GLOBAL:
                data = window[start + _BLOCK : start + _BLOCK + size]
                if len(data) < size:
                    data = _read_long(file, content=content, size=size)
                extra.update(_read_extra(data, kind=kind, content=content))
            continue
        data = _keep(window, start=start + _BLOCK, size=size, allowed=max_kept_bytes)
        max_kept_bytes -= len(data or b"")
        member, position = _make(header, content=content, size=size, extra=extra, data=data)
        extra = {}
        if member is not None:
            if content + member.length > end:
                raise _cut_off(member.offset, num_members=num_members)
            num_members += 1
            yield member
    if num_members and not ended:
        raise Refused(
            "truncated_part",
            detail=f"The tar has no end mark; {num_members:,} members before it are used",
            value=f"{end} bytes",
        )


def _make(
    header: bytes, *, content: int, size: int, extra: dict[str, bytes], data: bytes | None
) -> tuple[Member | None, int]:
    """Return the member that a header describes (None: a folder), and where the next header is."""
    kind, unfollowed = header[156], None
    if extra:
        data = None  # the size may be another
        raw = extra.get("path") or _read_name(header)
        unfollowed = "a sparse file" if "sparse" in extra else None
        if "size" in extra:
            size = _read_decimal(extra["size"], position=content)
    else:
        raw = _read_name(header)
    # Names in another encoding stay apart from each other, and can be written as UTF-8.
    name = raw.decode("utf-8", "backslashreplace")
    if kind in _REGULAR and name[-1:] != "/":
        following = content + -(-size // _BLOCK) * _BLOCK
        return Member(name, content, size, unfollowed, data), following
    if kind == _FOLDER or kind in _REGULAR:
        return None, content
    if kind in _BARE:
        size = 0
    what = _UNFOLLOWED.get(kind, f"of the unknown type {chr(kind)!r}")
    return Member(name, content, size, what), content + -(-size // _BLOCK) * _BLOCK


def _keep(window: bytes, *, start: int, size: int, allowed: int) -> bytes | None:
    """Return a member's content where it was read with its header and is not too long."""
    stop = start + size
    return window[start:stop] if size <= allowed and stop <= len(window) else None


def _check_plain(start: bytes) -> None:
    """Refuse a compressed tar, by its first bytes."""
    for magic, kind in _COMPRESSED.items():
        if start.startswith(magic):
            raise Refused(
                "damaged_part",
                detail=f"The tar is compressed ({kind}): its members cannot be reached one by one. "
                "Unpack it to a plain .tar",
                value=kind,
            )


def _read_size(header: bytes, *, position: int, num_members: int) -> int:
    """Check a header and return its size."""
    digits = header[124:135]
    if zlib.adler32(header) & 0xFFFF != _sum_with(header[148:156]):
        raise Refused(
            "damaged_part",
            detail=f"At byte {position:,} there is no header of a member; the {num_members:,} "
            "members before it are used",
            value=repr(header[:16]),
        )
    if digits.isdigit() and not header[135]:
        try:
            return int(digits, 8)
        except ValueError:  # an 8 or 9
            pass
    return _read_number(header[124:136], position=position)


@lru_cache(maxsize=1 << 14)
def _sum_with(field: bytes) -> int:
    """Return the low half of Adler-32 that a header with this checksum has; -1 if none can be.

    The checksum is the sum of the header's bytes, its own field counted as spaces. The low half of
    Adler-32 is one plus the sum of bytes, modulo 65,521, and is far faster than Python.
    """
    total = _read_octal(field)
    return -1 if total < 0 else (1 + total - _SPACES + sum(field)) % _ADLER


def _read_name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    if header[345] and header[257:263] == b"ustar\0":
        return header[345:500].partition(b"\0")[0] + b"/" + name
    return name


def _read_long(file: int, *, content: int, size: int) -> bytes:
    """Read the content of a PAX or GNU header."""
    if size > _MAX_NAME_BYTES:
        raise Refused(
            "damaged_part",
            detail=f"At byte {content:,} a member's name takes more than {_MAX_NAME_BYTES:,} bytes",
            value=str(size),
        )
    data = os.pread(file, size, content)
    if len(data) < size:
        raise _cut_off(content, num_members=None)
    return data


def _read_extra(data: bytes, *, kind: int, content: int) -> dict[str, bytes]:
    """Read what a PAX or GNU header says of the next member: path, size, or that it is sparse."""
    if kind == ord("L"):
        return {"path": data.partition(b"\0")[0]}
    if kind == ord("K"):
        return {}
    found: dict[str, bytes] = {}
    if _TIME.fullmatch(data):
        return found
    position, size = 0, len(data)
    while position < size and data[position]:
        record = _RECORD.match(data, position)
        stop = position + int(record[1]) if record else 0
        if record is None or not record.end() < stop <= size or data[stop - 1] != ord("\n"):
            raise Refused(
                "damaged_part",
                detail=f"At byte {content + position:,} there is no PAX record",
                value=repr(data[position : position + 16]),
            )
        keyword = record[2]
        if keyword in (b"path", b"size"):
            found[keyword.decode()] = data[record.end() : stop - 1]
        elif keyword.startswith(b"GNU.sparse"):
            found["sparse"] = b"1"
        position = stop
    return found


def _read_number(field: bytes, *, position: int) -> int:
    """Read a size: octal text, or base 256 where the first bit is set."""
    size = _read_octal(field)
    if field[0] & 0x80:
        size = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        size = -1 if field[0] == 0xFF else size
    return size if size >= 0 else _natural(size, field=field, position=position)


def _read_octal(field: bytes) -> int:
    """Read octal digits between spaces, up to a zero byte; -1 if there are other things."""
    digits = field.partition(b"\0")[0].strip(b" ") or b"0"
    try:
        return int(digits, 8) if digits.isdigit() else -1
    except ValueError:
        return -1


def _read_decimal(field: bytes, *, position: int) -> int:
    size = int(field) if field.isdigit() and len(field) < 20 else -1
    return _natural(size, field=field, position=position)


def _natural(size: int, *, field: bytes, position: int) -> int:
    if size < 0:
        raise Refused(
            "damaged_part",
            detail=f"At byte {position:,} a member's size is no whole number from 0 on",
            value=repr(field[:32]),
        )
    return size


def _cut_off(position: int, *, num_members: int | None) -> Refused:
    used = "" if num_members is None else f"; {num_members:,} members before it are used"
    return Refused(
        "truncated_part",
        detail=f"The tar ends in the middle of a member that starts at byte {position:,}{used}",
        value=f"at {position}",
    )
