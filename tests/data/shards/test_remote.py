"""Ranges of remote shards: joined where near, fetched ahead, never mixed up."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.core.errors import DataError, FormatError
from diptych.core.records import Shard
from diptych.data.files.store import ChangedFile, MissingFile
from diptych.data.shards import remote
from diptych.data.shards.remote import RemoteShards, Span, join

CONTENT = {
    name: np.random.default_rng(at).bytes(4_000_000) for at, name in enumerate(("a.tar", "b.tar"))
}


class FakeStore:
    """Counts the ranges that were asked for."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[Span] = []
        self.lock = threading.Lock()

    def read(self, path: str) -> bytes:
        return self.read_range(path, offset=0, length=len(CONTENT.get(path, b"")))

    def read_range(self, path: str, *, offset: int, length: int) -> bytes:
        with self.lock:
            self.asked.append(Span(path, offset, offset + length))
        if path == "down.tar":
            raise DataError("the network is down")
        if path not in CONTENT:
            raise MissingFile("gone")
        if offset + length > len(CONTENT[path]):
            raise ChangedFile("cut off")
        return CONTENT[path][offset : offset + length]


@pytest.fixture
def shards(monkeypatch):
    monkeypatch.setattr(remote, "Store", FakeStore)
    return RemoteShards("s3://bucket/shards")


def shard(path: str) -> Shard:
    return Shard(
        path=path,
        index_path="x",
        split="train",
        source="s",
        num_samples=1,
        num_images=1,
        num_bytes=1,
        sha256="0",
        index_sha256="0",
    )


def read(shards: RemoteShards, span: Span) -> list[bytes]:
    """Read a span as two members with a gap of 10 bytes between them."""
    middle = (span.start + span.end) // 2
    lengths = [middle - 10 - span.start, span.end - middle]
    return shards.read_members(shard(span.path), offsets=[span.start, middle], lengths=lengths)


def expected(span: Span) -> list[bytes]:
    middle = (span.start + span.end) // 2
    content = CONTENT[span.path]
    return [content[span.start : middle - 10], content[middle : span.end]]


SPANS = [Span("a.tar", at, at + 1_000) for at in (0, 1_500, 900_000, 3_000_000)]
SPANS += [Span("b.tar", 10, 2_000)]


def test_what_was_expected_is_fetched_once_and_side_by_side(shards):
    shards.expect(SPANS)
    for span in reversed(SPANS):
        assert read(shards, span) == expected(span)
    assert sorted(shards._store.asked) == [
        Span("a.tar", 0, 2_500),
        Span("a.tar", 900_000, 901_000),
        Span("a.tar", 3_000_000, 3_001_000),
        Span("b.tar", 10, 2_000),
    ]
    assert not shards._coming, "nothing is held that was taken"


def test_what_was_not_expected_is_fetched_when_asked_for(shards):
    assert read(shards, SPANS[0]) == expected(SPANS[0])
    shards.expect(SPANS[:1])
    for _ in range(2):
        assert read(shards, SPANS[0]) == expected(SPANS[0])


def test_a_new_expectation_keeps_what_is_coming_and_forgets_the_rest(shards):
    shards.expect(SPANS[:3])
    shards.expect(SPANS[2:4])
    assert set(shards._coming) == set(SPANS[2:4])
    for span in SPANS[2:4]:
        assert read(shards, span) == expected(span)
    asked = shards._store.asked
    assert len(asked) == len(set(asked)), "nothing is fetched twice"


def test_a_missing_or_short_shard_is_not_a_network_fault(shards):
    shards.expect([Span("gone.tar", 0, 100)])
    with pytest.raises(FormatError, match=r"gone\.tar' cannot be read.*prepare"):
        read(shards, Span("gone.tar", 0, 100))
    with pytest.raises(FormatError, match="cut off"):
        read(shards, Span("a.tar", 3_999_000, 4_000_100))
    with pytest.raises(DataError, match="network is down") as caught:
        read(shards, Span("down.tar", 0, 100))
    assert not isinstance(caught.value, FormatError)


def test_a_forked_process_connects_anew(shards):
    shards.expect(SPANS)
    before = shards._store
    pid = os.fork()
    if pid == 0:
        same = read(shards, SPANS[0]) == expected(SPANS[0]) and shards._store is not before
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert read(shards, SPANS[0]) == expected(SPANS[0])


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 40_000_000), st.integers(1, 3_000_000)),
        max_size=30,
        unique_by=lambda span: span[:2],
    )
)
def test_joined_ranges_hold_every_span_once(drawn):
    spans = [Span(path, start, start + length) for path, start, length in drawn]
    joined = join(spans)
    assert sorted(span for _, parts in joined for span in parts) == sorted(spans)
    for whole, parts in joined:
        assert all(part.path == whole.path for part in parts)
        assert all(whole.start <= part.start and part.end <= whole.end for part in parts)
        assert len(parts) == 1 or whole.end - whole.start <= 8 << 20
    firsts = [min(spans.index(part) for part in parts) for _, parts in joined]
    assert firsts == sorted(firsts), "what is wanted first comes first"
