"""Where each sample of a shard lies: one shard's index in memory, and a bounded number of them.

In: the bytes of an index file, checked against the manifest's hash. Out: numpy and Arrow memory,
which forked workers share without copying. How files are read is unknown here.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from diptych.core.errors import FormatError
from diptych.core.records import Shard

CURE = "Make the shards again: kedro run --pipelines=prepare"

_MAX_ROWS = 1 << 19
"""Samples whose indexes are kept, at about 120 bytes each; one shard's is kept in any case."""
_COLUMNS = ("key", "offsets", "lengths", "content_hash")


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """One shard's samples.

    Attributes:
        keys: [n] strings.
        content_hashes: [n] strings.
        first_members: [n + 1] int64, where a sample's members start in the next two.
        offsets: [number of members] int64, bytes from the tar's start.
        lengths: [number of members] int64, bytes.

    The last three are views of numpy memory: a view hands out a number in a third of the time.
    """

    keys: pa.Array
    content_hashes: pa.Array
    first_members: memoryview
    offsets: memoryview
    lengths: memoryview

    def members(self, row: int) -> tuple[list[int], list[int]]:
        """Return the offsets and the lengths of a sample's members, in the tar's order."""
        first, last = self.first_members[row], self.first_members[row + 1]
        return self.offsets[first:last].tolist(), self.lengths[first:last].tolist()


class ShardIndexes:
    """The indexes of some shards, read when they are asked for; the least used are let go."""

    def __init__(self, shards: Sequence[Shard], *, read: Callable[[str], bytes]) -> None:
        """Name the shards.

        Args:
            shards: in the order in which they are numbered.
            read: returns the bytes of a file, by its path.
        """
        self._shards = shards
        self._read = read
        self._kept: OrderedDict[int, ShardIndex] = OrderedDict()
        self._num_rows = 0
        self._lock = threading.Lock()

    def get(self, number: int) -> ShardIndex:
        """Return one shard's index.

        Raises:
            FormatError: it is not the one that the manifest names.
        """
        with self._lock:
            found = self._kept.get(number)
            if found is not None:
                self._kept.move_to_end(number)
                return found
        shard = self._shards[number]
        index = parse_index(self._read(shard.index_path), shard=shard)
        with self._lock:
            if number not in self._kept:
                self._kept[number] = index
                self._num_rows += shard.num_samples
            while self._num_rows > _MAX_ROWS and len(self._kept) > 1:
                dropped, _ = self._kept.popitem(last=False)
                self._num_rows -= self._shards[dropped].num_samples
        return index


def parse_index(data: bytes, *, shard: Shard) -> ShardIndex:
    """Read an index file.

    Raises:
        FormatError: it is not the one that the manifest names.
    """
    if hashlib.sha256(data).hexdigest() != shard.index_sha256:
        raise FormatError(
            f"The index '{shard.index_path}' is not the one that the manifest names", cure=CURE
        )
    try:
        # One thread: Arrow's own threads would not live on in a forked worker.
        file = pq.ParquetFile(pa.BufferReader(data))
        table = file.read(columns=list(_COLUMNS), use_threads=False)
        columns = {name: table[name].combine_chunks() for name in _COLUMNS}
    except (pa.ArrowInvalid, KeyError) as error:
        raise FormatError(
            f"The index '{shard.index_path}' cannot be read: {error}", cure=CURE
        ) from error
    if table.num_rows != shard.num_samples:
        raise FormatError(
            f"The index '{shard.index_path}' has {table.num_rows:,} rows, the manifest says "
            f"{shard.num_samples:,}",
            cure=CURE,
        )
    counts = columns["offsets"].value_lengths().to_numpy(zero_copy_only=False)
    return ShardIndex(
        keys=columns["key"],
        content_hashes=columns["content_hash"],
        first_members=np.cumsum([0, *counts], dtype=np.int64).data,
        offsets=columns["offsets"].flatten().to_numpy().data,
        lengths=columns["lengths"].flatten().to_numpy().data,
    )
