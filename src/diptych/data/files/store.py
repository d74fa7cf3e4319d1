"""One folder or URL that files are read from: whole, by ranges, or as a stream.

In: a root, which is a local folder or a URL. Out: bytes, sizes and listings of what lies below it;
no path leaves it. Knows nothing of formats.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from diptych.data.files.places import (
    ChangedFile,
    FileStat,
    MissingFile,
    PathEscapes,
    escaping,
    explained,
    is_url,
    leaves,
)

if TYPE_CHECKING:
    from diptych.data.files.remote import Remote

__all__ = ["ChangedFile", "FileStat", "MissingFile", "PathEscapes", "Store", "is_url"]

_MAX_FOLDERS = 10_000
"""So many folders are resolved once; it takes as long as reading a small image."""


class Store:
    """What lies below one local folder or URL.

    Local links may lead out of the root only where `links` is 'follow': for the files that a person
    named, never for paths that were read in data.
    """

    def __init__(self, root: str, *, links: Literal["inside", "follow"] = "inside") -> None:
        self.root = root
        self._links = links
        self._real_root = os.path.realpath(root)
        self._real_folders: dict[str, str] = {}
        self._found: tuple[str, Path] | None = None  # the last path that was looked for
        self._remote = _open_remote(root) if is_url(root) else None
        self._last: tuple[str, int] | None = None  # the file that ranges were last read from

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file that is kept open between ranged reads."""
        last, self._last = getattr(self, "_last", None), None
        if last is not None:
            os.close(last[1])

    def local(self, path: str) -> Path | None:
        """Return where a file lies on this machine; None where the root is a URL.

        Raises:
            PathEscapes: The path leaves the root.
        """
        if self._remote is not None:
            return None
        if self._found is None or self._found[0] != path:
            if self._links == "follow":
                escapes = leaves(path)
            else:
                escapes = "\0" in path or os.path.isabs(path) or self._leads_out(path)
            if escapes:
                raise escaping(path, root=self.root)
            self._found = path, Path(self.root, path)
        return self._found[1]

    def _leads_out(self, path: str) -> bool:
        """Tell whether a path leaves the root by its spelling or by links."""
        folder, name = os.path.split(path)
        if folder not in self._real_folders:
            if len(self._real_folders) == _MAX_FOLDERS:
                self._real_folders.clear()
            self._real_folders[folder] = os.path.realpath(os.path.join(self.root, folder))
        real, root = os.path.join(self._real_folders[folder], name), self._real_root
        if name in ("", ".", "..") or os.path.islink(real):
            real = os.path.realpath(real)
        return real != root and not real.startswith(root.rstrip(os.sep) + os.sep)

    def list(self) -> dict[str, FileStat]:
        """Return every file below the root, by its path, in order."""
        if self._remote is not None:
            return self._remote.list()
        found = {}
        with explained(".", root=self.root):
            for folder, _, names in os.walk(self.root, onerror=_raise):
                for name in names:
                    path = os.path.join(folder, name)
                    if os.path.isfile(path):
                        found[Path(os.path.relpath(path, self.root)).as_posix()] = _local_stat(path)
        return dict(sorted(found.items()))

    def stat(self, path: str) -> FileStat:
        """Return a file's size and stamp.

        Raises:
            MissingFile: It is not there.
            PathEscapes: The path leaves the root.
            ChangedFile: It is there, but is no file or cannot be looked at.
            DataError: The server cannot be reached, or refuses.
        """
        local = self.local(path)
        if self._remote is not None:
            return self._remote.stat(path)
        assert local is not None, "a local store"
        with explained(path, root=self.root):
            return _local_stat(local)

    def read(self, path: str) -> bytes:
        """Read a whole file.

        Raises:
            MissingFile, PathEscapes, ChangedFile, DataError: As `stat`.
        """
        num_bytes = self.stat(path).num_bytes
        return self.read_range(path, offset=0, length=num_bytes) if num_bytes else b""

    def read_range(self, path: str, *, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes from `offset` on.

        Raises:
            ChangedFile: The file ends earlier.
            MissingFile, PathEscapes, DataError: As `stat`.
        """
        if self._remote is not None:
            return self._remote.read_range(path, offset=offset, length=length)
        with explained(path, root=self.root):
            descriptor = self._descriptor(path)
            pieces = []
            while length > 0:
                piece = os.pread(descriptor, length, offset)
                if not piece:
                    raise ChangedFile(
                        f"'{path}' in '{self.root}' ends {length:,} bytes too early",
                        cure="Was it changed or cut off? Run again when it is complete",
                    )
                pieces.append(piece)
                offset += len(piece)
                length -= len(piece)
        return b"".join(pieces)

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading and seeking; remote ones are read ahead.

        Raises:
            MissingFile, PathEscapes, ChangedFile, DataError: As `stat`.
        """
        num_bytes = self.stat(path).num_bytes
        if self._remote is not None:
            return self._remote.open(path, num_bytes=num_bytes)
        local = self.local(path)
        assert local is not None, "a local store"
        with explained(path, root=self.root):
            return local.open("rb")

    def _descriptor(self, path: str) -> int:
        if self._last is None or self._last[0] != path:
            local = self.local(path)
            assert local is not None, "a local store"
            self.close()
            self._last = (path, os.open(local, os.O_RDONLY | os.O_CLOEXEC))
        return self._last[1]


def _open_remote(root: str) -> Remote:
    from diptych.data.files.remote import (
        Remote,  # a tenth of a second that local files need not wait
    )

    return Remote(root)


def _local_stat(path: str | Path) -> FileStat:
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ChangedFile(f"'{path}' is not a file", allowed="Only plain files are read")
    return FileStat(num_bytes=found.st_size, stamp=f"stat:{found.st_mtime_ns}")


def _raise(error: OSError) -> None:
    raise error
