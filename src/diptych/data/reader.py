"""Read samples of shards at random, by their offsets.

In: the shards folder, the manifest, a split. Out: samples with their images' bytes, by row number;
rows are numbered over the split's shards in the manifest's order. Nothing is decoded. What a reader
holds is numpy and Arrow memory, which forked workers share without copying.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from diptych.core.errors import DataError, FormatError
from diptych.core.files import inside
from diptych.core.hashing import sha256_file
from diptych.core.records import ImageRef, Manifest, Message, Sample, Shard

_MAX_OPEN_FILES = 128
_CURE = "Make the shards again: kedro run --pipelines=prepare"


@dataclass(frozen=True, slots=True)
class StoredSample:
    """A sample as it lies in a shard: its record, and each image's original bytes."""

    sample: Sample
    images: list[bytes]


class ShardReader:
    """Random access to one split; picklable, and safe to use after a fork and from threads."""

    def __init__(
        self, folder: Path, *, manifest: Manifest, split: Literal["train", "heldout"]
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._split: Literal["train", "heldout"] = split
        self._shards = [shard for shard in manifest.shards if shard.split == split]
        tables = [_read_index(folder, shard=shard) for shard in self._shards]
        counts = [table.num_rows for table in tables]
        self._first_rows = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._keys = _column(tables, name="key", kind=pa.string())
        self._offsets, self._first_members = _flatten(tables, name="offsets")
        self._lengths, _ = _flatten(tables, name="lengths")
        self._widths_px, self._first_images = _flatten(tables, name="widths_px")
        self._heights_px, _ = _flatten(tables, name="heights_px")
        self._files: OrderedDict[int, _File] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what makes a reader, not what it holds: another process opens files anew."""
        return _reopen, (self._folder, self._manifest, self._split)

    def __len__(self) -> int:
        """Count the samples."""
        return self.num_samples

    @property
    def num_samples(self) -> int:
        """Count the samples of the split."""
        return int(self._first_rows[-1])

    @property
    def keys(self) -> pa.ChunkedArray:
        """The samples' keys, [number of rows] strings."""
        return self._keys

    @property
    def widths_px(self) -> np.ndarray:
        """Every image's width, [number of images] int32, sample after sample."""
        return self._widths_px

    @property
    def heights_px(self) -> np.ndarray:
        """Every image's height, [number of images] int32, sample after sample."""
        return self._heights_px

    @property
    def first_images(self) -> np.ndarray:
        """Where a row's images start in `widths_px`, [number of rows + 1] int64."""
        return self._first_images

    def read(self, row: int) -> StoredSample:
        """Read one sample.

        Args:
            row: From 0 to `num_samples` - 1.

        Raises:
            FormatError: The shard is not what its index says.
        """
        if not 0 <= row < self.num_samples:
            raise IndexError(f"row {row} of {self.num_samples}")
        number = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        file = self._open(number)
        first, last = self._first_members[row], self._first_members[row + 1]
        contents = [
            self._pread(file, number=number, member=member) for member in range(first, last)
        ]
        shard = self._shards[number]
        try:
            sample = _parse(contents[-1], split=self._split)
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            raise FormatError(
                f"Row {row} of the shard '{shard.path}' is not a sample: {error!r}", cure=_CURE
            ) from error
        if sample.key != self._keys[row].as_py() or len(sample.images) != len(contents) - 1:
            raise FormatError(
                f"Row {row} of the shard '{shard.path}' is sample '{sample.key}', its index says "
                f"'{self._keys[row]}'",
                cure=_CURE,
            )
        return StoredSample(sample=sample, images=contents[:-1])

    def _open(self, number: int) -> _File:
        with self._lock:
            file = self._files.get(number)
            if file is None:
                file = _File(self._folder, shard=self._shards[number])
                self._files[number] = file
                if len(self._files) > _MAX_OPEN_FILES:
                    self._files.popitem(last=False)
            self._files.move_to_end(number)
            return file

    def _pread(self, file: _File, *, number: int, member: int) -> bytes:
        length = int(self._lengths[member])
        data = os.pread(file.descriptor, length, int(self._offsets[member]))
        if len(data) != length:
            raise FormatError(
                f"The shard '{self._shards[number].path}' ends before its index says", cure=_CURE
            )
        return data


class _File:
    """An open shard, closed when nobody holds it: a thread may still read an evicted one."""

    def __init__(self, folder: Path, *, shard: Shard) -> None:
        self.descriptor = -1
        try:
            path = inside(shard.path, folder=folder)
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, DataError) as error:
            raise FormatError(
                f"The shard '{shard.path}' cannot be read: {error}", cure=_CURE
            ) from error
        found = os.fstat(self.descriptor).st_size
        if found != shard.num_bytes:
            raise FormatError(
                f"The shard '{shard.path}' has {found:,} bytes, the manifest says "
                f"{shard.num_bytes:,}",
                cure=_CURE,
            )

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def _reopen(folder: Path, manifest: Manifest, split: Literal["train", "heldout"]) -> ShardReader:
    return ShardReader(folder, manifest=manifest, split=split)


def _read_index(folder: Path, *, shard: Shard) -> pa.Table:
    try:
        path = inside(shard.index_path, folder=folder)
        if sha256_file(path) != shard.index_sha256:
            raise FormatError(
                f"The index '{shard.index_path}' is not the one that the manifest names", cure=_CURE
            )
        # One thread: Arrow's own threads would not live on in a forked worker.
        table = pq.ParquetFile(path, memory_map=True).read(use_threads=False)
    except (OSError, pa.ArrowInvalid, DataError) as error:
        raise FormatError(
            f"The index '{shard.index_path}' cannot be read: {error}", cure=_CURE
        ) from error
    if table.num_rows != shard.num_samples:
        raise FormatError(
            f"The index '{shard.index_path}' has {table.num_rows:,} rows, the manifest says "
            f"{shard.num_samples:,}",
            cure=_CURE,
        )
    return table


def _column(tables: list[pa.Table], *, name: str, kind: pa.DataType) -> pa.ChunkedArray:
    chunks = [chunk for table in tables for chunk in table[name].chunks]
    return pa.chunked_array(chunks, type=kind)


def _flatten(tables: list[pa.Table], *, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a list column's values one after the other, and where each row's begin."""
    dtype = np.int64 if name in ("offsets", "lengths") else np.int32
    chunks = [chunk for table in tables for chunk in table[name].chunks]
    values = [chunk.flatten().to_numpy().astype(dtype) for chunk in chunks]
    counts = [chunk.value_lengths().to_numpy().astype(np.int64) for chunk in chunks]
    firsts = np.concatenate([[0], *counts]).cumsum(dtype=np.int64)
    return np.concatenate([np.empty(0, dtype=dtype), *values]), firsts


def _parse(data: bytes, *, split: Literal["train", "heldout"]) -> Sample:
    """Read `key.json`."""
    found = json.loads(data)
    return Sample(
        key=found["key"],
        source=found["source"],
        split=split,
        messages=tuple(Message(**message) for message in found["messages"]),
        images=tuple(
            ImageRef(
                path=image["path"],
                width_px=image["width_px"],
                height_px=image["height_px"],
                format=image["format"],
            )
            for image in found["images"]
        ),
        kinds=tuple(found["kinds"]),
    )
