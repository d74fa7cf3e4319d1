"""The bytes of a shard: a plain USTAR archive, the same for the same members.

In: member names and their bytes. Out: a tar and where each member's data lies in it. Knows nothing
of samples. webdataset's own writer would add a PAX header of 1,024 bytes to every member.
"""

from __future__ import annotations

import io
import re
import tarfile
from hashlib import sha256
from types import TracebackType
from typing import BinaryIO

_BLOCK_BYTES = tarfile.BLOCKSIZE
_UNSAFE = re.compile(rb"[^A-Za-z0-9_-]")
_MAX_STEM_CHARS = 80


class TarWriter:
    """Write members one after the other; the archive is whole once the block has ended."""

    def __init__(self, file: BinaryIO) -> None:
        self._tar = tarfile.open(  # noqa: SIM115 - closed in __exit__
            fileobj=file, mode="w", format=tarfile.USTAR_FORMAT
        )

    def __enter__(self) -> TarWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tar.close()

    def add(self, name: str, *, data: bytes) -> int:
        """Append a member and return the offset of its data, in bytes from the tar's start."""
        member = tarfile.TarInfo(name)
        member.size = len(data)
        member.mode = 0o644
        self._tar.addfile(member, io.BytesIO(data))
        return self._tar.offset - -(-len(data) // _BLOCK_BYTES) * _BLOCK_BYTES


def quote_stem(name: str) -> str:
    """Spell a sample's id as a member's stem that every reader of shards groups rightly.

    Letters, digits, '-' and '_' stay; any other byte becomes %XX, because readers split names at
    dots and slashes. Different ids give different stems; a long one ends in its hash, so that the
    name fits into a USTAR header.
    """
    stem = _UNSAFE.sub(lambda found: b"%%%02X" % found[0][0], name.encode()).decode()
    if len(stem) <= _MAX_STEM_CHARS:
        return stem
    digest = sha256(name.encode()).hexdigest()[:24]
    # '%' followed by no digit cannot come from quoting: no short id has such a stem.
    return f"{stem[: _MAX_STEM_CHARS - 27]}%-{digest}"
