"""Bytes of shards behind a URL, by ranges that are fetched ahead and side by side.

In: a store, and the spans of bytes that will be asked for. Out: members' bytes. Near spans of a
shard travel as one range. What is held is what was announced and not yet taken. Samples and indexes
are unknown here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from diptych.core.errors import FormatError
from diptych.core.records import Shard
from diptych.data.files.store import ChangedFile, MissingFile, PathEscapes, Store
from diptych.data.shards.tables import CURE

Argument = TypeVar("Argument")
Result = TypeVar("Result")

_NUM_CONNECTIONS = 16
_MAX_GAP_BYTES = 256 << 10
"""Fetching as many bytes too many costs less than another request."""
_MAX_RANGE_BYTES = 8 << 20


class Span(NamedTuple):
    """Bytes [start, end) of a file."""

    path: str
    start: int
    end: int


class RemoteShards:
    """A URL of shards; safe to use after a fork, for connections are opened on first use."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pid = -1
        self._store: Store
        self._threads: ThreadPoolExecutor
        self._coming: dict[Span, tuple[Span, Future[bytes]]] = {}

    def read_file(self, path: str) -> bytes:
        """Read a whole file.

        Raises:
            FormatError: it is missing.
            DataError: the server cannot be reached, or refuses.
        """
        self._connect()
        return _explained(self._store.read, path)

    def read_members(
        self, shard: Shard, *, offsets: Sequence[int], lengths: Sequence[int]
    ) -> list[bytes]:
        """Return some members of a shard, fetched ahead if they were expected.

        Raises:
            FormatError: the shard is missing, or ends before its index says.
            DataError: the server cannot be reached, or refuses.
        """
        self._connect()
        span = span_of(shard, offsets=offsets, lengths=lengths)
        fetched, future = self._coming.pop(span, (span, None))
        data = self._fetch(span) if future is None else future.result()
        return [
            data[offset - fetched.start : offset - fetched.start + length]
            for offset, length in zip(offsets, lengths, strict=True)
        ]

    def expect(self, spans: Iterable[Span]) -> None:
        """Say what will be asked for from now on, first things first; the rest is forgotten."""
        self._connect()
        wanted = dict.fromkeys(spans)
        for span in [span for span in self._coming if span not in wanted]:
            self._coming.pop(span)[1].cancel()
        new = [span for span in wanted if span not in self._coming]
        for joined, parts in join(new):
            future = self._threads.submit(self._fetch, joined)
            self._coming.update(dict.fromkeys(parts, (joined, future)))

    def each(
        self, function: Callable[[Argument], Result], arguments: Iterable[Argument]
    ) -> list[Result]:
        """Call a function for each argument, side by side."""
        self._connect()
        return list(self._threads.map(function, arguments))

    def _fetch(self, span: Span) -> bytes:
        path, start, end = span
        return _explained(
            lambda path: self._store.read_range(path, offset=start, length=end - start), path
        )

    def _connect(self) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._coming = {}
            self._store = Store(self._url)
            self._threads = ThreadPoolExecutor(_NUM_CONNECTIONS, thread_name_prefix="shards")


def span_of(shard: Shard, *, offsets: Sequence[int], lengths: Sequence[int]) -> Span:
    """Return the bytes from a sample's first member to the end of its last."""
    return Span(shard.path, offsets[0], offsets[-1] + lengths[-1])


def join(spans: Iterable[Span]) -> list[tuple[Span, list[Span]]]:
    """Join near spans of a file into ranges, each with the spans that it holds.

    Ranges come in the order of the first span in each, as the spans were given.
    """
    ranks = {span: rank for rank, span in enumerate(spans)}
    groups: list[list[Span]] = []
    for span in sorted(ranks):
        last = groups[-1] if groups else []
        is_near = (
            len(last) > 0
            and last[-1].path == span.path
            and span.start - last[-1].end <= _MAX_GAP_BYTES
            and span.end - last[0].start <= _MAX_RANGE_BYTES
        )
        if is_near:
            last.append(span)
        else:
            groups.append([span])
    groups.sort(key=lambda group: min(ranks[span] for span in group))
    return [
        (Span(group[0].path, group[0].start, max(span.end for span in group)), group)
        for group in groups
    ]


def _explained(read: Callable[[str], bytes], path: str) -> bytes:
    try:
        return read(path)
    except (MissingFile, PathEscapes, ChangedFile) as error:
        raise FormatError(f"The file '{path}' cannot be read: {error}", cure=CURE) from error
