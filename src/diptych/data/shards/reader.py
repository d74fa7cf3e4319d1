"""Read samples of shards at random, by their offsets.

In: the shards folder or its URL, the manifest, a split. Out: samples with their images' bytes, by
number; samples are numbered over the split's shards in the manifest's order. Nothing is decoded.
Indexes are read when a shard is first asked for, and as many are kept as a few windows need.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from diptych.core.errors import DataError, FormatError
from diptych.core.hashing import xxh3_bytes
from diptych.core.records import ImageRef, Manifest, Message, Sample, Shard
from diptych.data.content import content_hash, dump_messages
from diptych.data.files.store import is_url
from diptych.data.shards.local import LocalShards
from diptych.data.shards.remote import RemoteShards, Span, span_of
from diptych.data.shards.tables import CURE, ShardIndexes


@dataclass(frozen=True)
class StoredSample:
    """A sample as it lies in a shard.

    Attributes:
        sample: its record.
        images: each image's original bytes.
        content_hash: what its shard's index says of messages and images.
    """

    sample: Sample
    images: list[bytes]
    content_hash: str

    @cached_property
    def image_hashes(self) -> list[str]:
        """Each image's xxh3_128."""
        return [xxh3_bytes(image) for image in self.images]

    def check(self) -> None:
        """Compare the content with its hash.

        Raises:
            DataError: bytes have changed since the shard was written.
        """
        found = content_hash(dump_messages(self.sample.messages), image_hashes=self.image_hashes)
        if found != self.content_hash:
            raise DataError(
                f"The sample '{self.sample.key}' has the content hash {found}",
                allowed=f"Its shard's index says {self.content_hash}",
                cure=CURE,
            )


class ShardReader:
    """Random access to one split; picklable, and safe to use after a fork.

    Local shards may be read from several threads; what was expected of remote ones is one thread's.
    """

    def __init__(
        self, folder: Path | str, *, manifest: Manifest, split: Literal["train", "heldout"]
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._split: Literal["train", "heldout"] = split
        self._shards = [shard for shard in manifest.shards if shard.split == split]
        counts = [shard.num_samples for shard in self._shards]
        self._starts = np.cumsum([0, *counts], dtype=np.int64).data
        remote = RemoteShards(str(folder)) if is_url(str(folder)) else None
        self._remote = remote
        self._files = remote or LocalShards(Path(folder))
        self._indexes = ShardIndexes(self._shards, read=self._files.read_file)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what makes a reader, not what it holds: another process opens files anew."""
        return _reopen, (self._folder, self._manifest, self._split)

    def __len__(self) -> int:
        """Count the samples."""
        return self.num_samples

    @property
    def num_samples(self) -> int:
        """Count the samples of the split."""
        return self._starts[-1]

    @property
    def is_remote(self) -> bool:
        """Tell whether the shards lie behind a URL."""
        return self._remote is not None

    @property
    def keys(self) -> pa.ChunkedArray:
        """Every sample's key, [number of samples] strings; reads every index."""
        chunks = [self._indexes.get(number).keys for number in range(len(self._shards))]
        return pa.chunked_array(chunks, type=pa.string())

    def read(self, row: int) -> StoredSample:
        """Read one sample.

        What comes from afar is compared with its content hash, and read once more if it differs;
        `StoredSample.check` says what has changed for good.

        Args:
            row: From 0 to `num_samples` - 1.

        Raises:
            FormatError: The shard is not what its index says.
            DataError: The server of remote shards cannot be reached.
        """
        stored = self._parse(row)
        if self.is_remote:
            try:
                stored.check()
            except DataError:
                stored = self._parse(row)
        return stored

    def read_members(self, row: int) -> list[bytes]:
        """Read one sample's members as they are: its images, then its JSON.

        Raises:
            IndexError: There is no such row.
            FormatError: The shard is not what its index says.
        """
        return self._read_place(*self._locate(row))

    def expect(self, rows: Iterable[int]) -> None:
        """Begin to fetch the samples that will be read from now on, if the shards are remote."""
        if self._remote is None:
            return
        places = [self._locate(int(row)) for row in rows]
        # Side by side, for each that is not kept takes a way to the server.
        self._remote.each(self._indexes.get, dict.fromkeys(number for number, _ in places))
        self._remote.expect([self._span(number, place) for number, place in places])

    def _read_place(self, number: int, place: int) -> list[bytes]:
        offsets, lengths = self._indexes.get(number).members(place)
        return self._files.read_members(self._shards[number], offsets=offsets, lengths=lengths)

    def _span(self, number: int, place: int) -> Span:
        offsets, lengths = self._indexes.get(number).members(place)
        return span_of(self._shards[number], offsets=offsets, lengths=lengths)

    def _locate(self, row: int) -> tuple[int, int]:
        """Return a sample's shard and its place in it."""
        number = bisect_right(self._starts, row) - 1
        if not 0 <= number < len(self._shards):
            raise IndexError(f"row {row} of {self.num_samples}")
        return number, row - self._starts[number]

    def _parse(self, row: int) -> StoredSample:
        number, place = self._locate(row)
        *images, text = self._read_place(number, place)
        shard, index = self._shards[number], self._indexes.get(number)
        try:
            sample = _parse_json(text, shard=shard)
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            raise FormatError(
                f"Row {row} of the split, in the shard '{shard.path}', is not a sample: {error!r}",
                cure=CURE,
            ) from error
        key = index.keys[place].as_py()
        if sample.key != key or len(sample.images) != len(images):
            raise FormatError(
                f"Row {row} of the split, in the shard '{shard.path}', is sample '{sample.key}', "
                f"its index says '{key}'",
                cure=CURE,
            )
        return StoredSample(sample, images, content_hash=index.content_hashes[place].as_py())


def _reopen(
    folder: Path | str, manifest: Manifest, split: Literal["train", "heldout"]
) -> ShardReader:
    return ShardReader(folder, manifest=manifest, split=split)


def _parse_json(data: bytes, *, shard: Shard) -> Sample:
    """Read `key.json`."""
    found = json.loads(data.decode())
    return Sample(
        key=found["key"],
        source=shard.source,
        split=shard.split,
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
