"""Which samples go into which shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.core.tables import SAMPLE_INDEX
from diptych.data.shards.cut import Cut, ShardParams, cut, read_rows

SAMPLES = st.lists(
    st.tuples(
        st.sampled_from(["train", "heldout"]),
        st.sampled_from(["a", "b"]),
        st.lists(st.integers(0, 50), max_size=3),
        st.integers(0, 20),
    ),
    max_size=60,
)


def write(folder: Path, samples: list[tuple], *, part_rows: int, group_rows: int) -> Path:
    rows: list[dict[str, Any]] = [
        {
            "key": str(number),
            "split": split,
            "source": source,
            "image_lengths": lengths,
            "text_bytes": text_bytes,
        }
        for number, (split, source, lengths, text_bytes) in enumerate(samples)
    ]
    table = pa.Table.from_pylist(rows, schema=SAMPLE_INDEX)
    folder.mkdir()
    for number, first in enumerate(range(0, len(rows), part_rows)):
        path = folder / f"{number:06d}.parquet"
        pq.write_table(table.slice(first, part_rows), path, row_group_size=group_rows)
    return folder


def one_by_one(samples: list[tuple], *, params: ShardParams) -> dict[tuple, list[list[str]]]:
    """Cut as the words say: into the open shard if it fits, else into a new one."""
    shards: dict[tuple, list[list[str]]] = {}
    open_bytes: dict[tuple, int] = {}
    for number, (split, source, lengths, text_bytes) in enumerate(samples):
        size = sum(lengths) + text_bytes
        groups = shards.setdefault((split, source), [[]])
        total = open_bytes.get((split, source), 0)
        full = len(groups[-1]) == params.max_samples or total + size > params.max_bytes
        if groups[-1] and full:
            groups.append([])
            total = 0
        groups[-1].append(str(number))
        open_bytes[split, source] = total + size
    return shards


@settings(deadline=None)
@given(SAMPLES, st.integers(1, 7), st.integers(1, 120), st.integers(1, 20), st.integers(1, 9))
def test_shards_are_cut_as_one_by_one(
    tmp_path_factory, samples, max_samples, max_bytes, part_rows, group_rows
) -> None:
    params = ShardParams(max_samples=max_samples, max_bytes=max_bytes)
    folder = tmp_path_factory.mktemp("cut") / "index"
    write(folder, samples, part_rows=part_rows, group_rows=group_rows)
    found: dict[tuple, list[tuple[Cut, list[str]]]] = {}
    for part in cut(folder, params=params):
        keys = [row["key"] for row in read_rows(folder, chosen=part, columns=["key"])]
        assert len(keys) == part.num_samples
        sizes = [sum(samples[int(key)][2]) + samples[int(key)][3] for key in keys]
        assert sum(sizes) == part.num_bytes
        found.setdefault((part.split, part.source), []).append((part, keys))
    expected = one_by_one(samples, params=params)
    assert {name: [keys for _, keys in parts] for name, parts in found.items()} == expected
    for parts in found.values():
        assert [part.number for part, _ in parts] == list(range(len(parts)))


def test_large_parts_are_read_in_batches(tmp_path: Path) -> None:
    samples = [("train" if n % 3 else "heldout", "a", [n % 5], 1) for n in range(150_000)]
    folder = write(tmp_path / "index", samples, part_rows=100_000, group_rows=90_000)
    params = ShardParams(max_samples=40_000)
    cuts = list(cut(folder, params=params))
    assert sorted((part.split, part.number, part.num_samples) for part in cuts) == [
        ("heldout", 0, 40_000),
        ("heldout", 1, 10_000),
        ("train", 0, 40_000),
        ("train", 1, 40_000),
        ("train", 2, 20_000),
    ]
    keys = [
        int(row["key"]) for part in cuts for row in read_rows(folder, chosen=part, columns=["key"])
    ]
    assert sorted(keys) == list(range(150_000))
