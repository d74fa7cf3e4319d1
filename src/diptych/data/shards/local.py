"""Bytes of shards in a local folder, by `pread`: no seeking, so threads and forks can share a file.

In: a shard and its members' places. Out: their bytes. Samples and indexes are unknown here.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from diptych.core.errors import DataError, FormatError
from diptych.core.files import inside
from diptych.core.records import Shard
from diptych.data.shards.tables import CURE

_MAX_OPEN_FILES = 128


class LocalShards:
    """A folder of shards, of which the last used are kept open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: OrderedDict[str, _File] = OrderedDict()
        self._lock = threading.Lock()

    def read_file(self, path: str) -> bytes:
        """Read a whole file.

        Raises:
            FormatError: it is missing, cannot be read, or its path leaves the folder.
        """
        try:
            return inside(path, folder=self._folder).read_bytes()
        except (OSError, DataError) as error:
            raise FormatError(f"The file '{path}' cannot be read: {error}", cure=CURE) from error

    def read_members(
        self, shard: Shard, *, offsets: Sequence[int], lengths: Sequence[int]
    ) -> list[bytes]:
        """Read some members of a shard.

        Raises:
            FormatError: the shard is missing, or has another size than the manifest says.
        """
        file = self._file(shard)
        contents = []
        for offset, length in zip(offsets, lengths, strict=True):
            content = os.pread(file.descriptor, length, offset)
            if len(content) != length:
                raise FormatError(f"The shard '{shard.path}' ends before its index says", cure=CURE)
            contents.append(content)
        return contents

    def _file(self, shard: Shard) -> _File:
        with self._lock:
            file = self._open.get(shard.path)
            if file is None:
                file = self._open[shard.path] = _File(self._folder, shard=shard)
                if len(self._open) > _MAX_OPEN_FILES:
                    self._open.popitem(last=False)
            self._open.move_to_end(shard.path)
            return file


class _File:
    """An open shard, closed when nobody holds it: a thread may still read an evicted one."""

    def __init__(self, folder: Path, *, shard: Shard) -> None:
        self.descriptor = -1
        try:
            path = inside(shard.path, folder=folder)
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, DataError) as error:
            raise FormatError(
                f"The shard '{shard.path}' cannot be read: {error}", cure=CURE
            ) from error
        found = os.fstat(self.descriptor).st_size
        if found != shard.num_bytes:
            raise FormatError(
                f"The shard '{shard.path}' has {found:,} bytes, the manifest says "
                f"{shard.num_bytes:,}",
                cure=CURE,
            )

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
