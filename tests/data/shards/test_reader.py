"""Random access to shards, from any process, and what a damaged shard says."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from diptych.core.errors import DataError, FormatError
from diptych.core.records import Manifest
from diptych.data.indexing.index import IndexParams, index
from diptych.data.shards import local, tables
from diptych.data.shards.reader import ShardReader
from diptych.data.shards.shard import ShardParams, shard
from tests.data.conftest import Dataset


@dataclass
class Stored:
    """Shards, their manifest, and the raw rows they were made of."""

    folder: Path
    manifest: Manifest
    rows: list[dict]
    images: Path

    def reader(self) -> ShardReader:
        return ShardReader(self.folder, manifest=self.manifest, split="train")


@pytest.fixture
def stored(dataset: Dataset, tmp_path: Path) -> Stored:
    dataset.fill(9)
    dataset.add("pair", "good-3.jpg", "good-4.png", kinds=["compare"])
    dataset.add("text", answer="nothing")
    raw_samples = dataset.write()
    sample_index, quarantine = index(raw_samples, IndexParams(), str(tmp_path / "index"))
    params = ShardParams(max_samples=4)
    folder, manifest = shard(
        sample_index, raw_samples, quarantine, params, str(tmp_path / "shards")
    )
    return Stored(folder, manifest, dataset.rows, dataset.folder / "images")


def _check(stored: Stored, reader: ShardReader, row: int) -> None:
    expected = stored.rows[row]
    found = reader.read(row)
    assert found.sample.key == f"toy/{expected['id']}"
    assert found.sample.split == "train"
    assert [m.text for m in found.sample.messages] == [
        turn["value"] for turn in expected["conversations"]
    ]
    assert found.sample.kinds == tuple(expected.get("kinds", ()))
    names = expected.get("image", [])
    names = [names] if isinstance(names, str) else names
    assert [image.path for image in found.sample.images] == names
    assert found.images == [(stored.images / name).read_bytes() for name in names]


def test_every_row_in_any_order(stored: Stored) -> None:
    reader = stored.reader()
    assert reader.num_samples == len(reader) == len(stored.rows) == 11
    assert reader.keys.to_pylist() == [f"toy/{row['id']}" for row in stored.rows]
    order = list(range(11)) * 2
    random.Random(0).shuffle(order)
    for row in order:
        _check(stored, reader, row)
    for row in (-1, 11):
        with pytest.raises(IndexError):
            reader.read(row)


def test_members_come_as_they_lie_in_the_tar(stored: Stored) -> None:
    reader = stored.reader()
    for row, raw in enumerate(stored.rows):
        names = raw.get("image", [])
        names = [names] if isinstance(names, str) else names
        *images, text = reader.read_members(row)
        assert images == [(stored.images / name).read_bytes() for name in names]
        assert json.loads(text)["key"] == f"toy/{raw['id']}"
    with pytest.raises(IndexError):
        reader.read_members(11)


def test_few_indexes_are_kept(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_MAX_ROWS", 8)
    reader = stored.reader()
    reads = []
    read_file = reader._files.read_file
    monkeypatch.setattr(
        reader._indexes, "_read", lambda path: reads.append(path) or read_file(path)
    )
    assert not reads, "nothing is read before it is needed"
    for row in (0, 1, 4, 0, 5, 9, 4, 0):
        _check(stored, reader, row)
    names = [f"train/toy-00000{number}.parquet" for number in (0, 1, 2, 0)]
    assert reads == names, "shard 0 was let go for shard 2, which was used later"
    assert len(reader._indexes._kept) == 2


def test_an_empty_split(stored: Stored) -> None:
    reader = ShardReader(stored.folder, manifest=stored.manifest, split="heldout")
    assert reader.num_samples == 0
    assert reader.keys.to_pylist() == []
    with pytest.raises(IndexError):
        reader.read(0)


def test_a_pickled_reader_reads_the_same_and_carries_no_table(stored: Stored) -> None:
    reader = stored.reader()
    reader.read(3)
    data = pickle.dumps(reader)
    assert pickle.loads(data).read(3) == reader.read(3)
    assert b"good-3" not in data


def _read_in_child(reader: ShardReader, queue: multiprocessing.Queue) -> None:
    queue.put([reader.read(row).sample.key for row in (10, 0, 5)])


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_read_too(stored: Stored, method: str) -> None:
    reader = stored.reader()
    reader.read(0)
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    children = [context.Process(target=_read_in_child, args=(reader, queue)) for _ in range(2)]
    for child in children:
        child.start()
    found = [queue.get(timeout=60) for _ in children]
    for child in children:
        child.join(timeout=60)
    assert found == [["toy/text", "toy/good-0", "toy/good-5"]] * 2
    _check(stored, reader, 1)


def test_threads_share_a_reader_with_few_open_files(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_MAX_OPEN_FILES", 1)
    reader = stored.reader()
    rows = list(range(11)) * 20
    random.Random(1).shuffle(rows)
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda row: _check(stored, reader, row), rows):
            pass
    assert len(reader._files._open) == 1


def test_no_file_stays_open(stored: Stored) -> None:
    descriptors = Path("/proc/self/fd")
    before = {path.resolve() for path in descriptors.iterdir()}
    reader = stored.reader()
    for row in range(11):
        reader.read(row)
    opened = {path.resolve() for path in descriptors.iterdir()} - before
    assert len([path for path in opened if path.suffix == ".tar"]) == 3
    del reader
    after = {path.resolve() for path in descriptors.iterdir()}
    assert not [path for path in after if path.suffix == ".tar"]


def test_a_tar_shorter_than_its_index_says(stored: Stored) -> None:
    path = stored.folder / stored.manifest.shards[1].path
    path.write_bytes(path.read_bytes()[:-1024])
    reader = stored.reader()
    _check(stored, reader, 0)
    with pytest.raises(FormatError, match=r"train/toy-000001\.tar' has .* the manifest says.*prep"):
        reader.read(4)


def test_a_tar_cut_while_it_is_read(stored: Stored) -> None:
    reader = stored.reader()
    reader.read(4)
    path = stored.folder / stored.manifest.shards[1].path
    with path.open("r+b") as file:
        file.truncate(700)
    with pytest.raises(FormatError, match="ends before its index says"):
        reader.read(7)


def test_a_missing_tar_and_one_with_other_content(stored: Stored) -> None:
    first, second, third = (stored.folder / part.path for part in stored.manifest.shards)
    first.unlink()
    content = bytearray(second.read_bytes())
    content[content.index(b'{"content_hash"')] = ord("x")
    second.write_bytes(bytes(content))
    third.write_bytes(third.read_bytes().replace(b'"toy/good-8"', b'"toy/bad--8"'))
    reader = stored.reader()
    with pytest.raises(FormatError, match="cannot be read"):
        reader.read(0)
    with pytest.raises(FormatError, match=r"toy-000001\.tar', is not a sample"):
        reader.read(4)
    with pytest.raises(FormatError, match=r"is sample 'toy/bad--8', its index says 'toy/good-8'"):
        reader.read(8)


def test_a_changed_byte_is_noticed(stored: Stored) -> None:
    path = stored.folder / stored.manifest.shards[0].path
    reader = stored.reader()
    sample = reader.read(1)
    sample.check()
    content = bytearray(path.read_bytes())
    content[content.index(sample.images[0]) + 40] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match="'toy/good-1' has the content hash"):
        stored.reader().read(1).check()
    stored.reader().read(0).check()


def test_a_damaged_or_foreign_index(stored: Stored) -> None:
    first, second = (stored.folder / part.index_path for part in stored.manifest.shards[:2])
    whole = first.read_bytes()
    first.write_bytes(second.read_bytes())
    _check(stored, stored.reader(), 5)
    with pytest.raises(FormatError, match="not the one that the manifest names"):
        stored.reader().read(0)
    first.unlink()
    with pytest.raises(FormatError, match=r"train/toy-000000\.parquet' cannot be read"):
        stored.reader().read(0)
    first.write_bytes(whole)
    _check(stored, stored.reader(), 0)


def test_no_path_leaves_the_folder(stored: Stored) -> None:
    shards = [
        part.model_copy(update={"path": f"../shards/{part.path}"})
        for part in stored.manifest.shards
    ]
    outside = [part.model_copy(update={"path": "../../etc/passwd"}) for part in shards]
    for parts, allowed in ((shards, True), (outside, False)):
        manifest = stored.manifest.model_copy(update={"shards": tuple(parts)})
        reader = ShardReader(stored.folder, manifest=manifest, split="train")
        if allowed:
            assert reader.read(0).images
        else:
            with pytest.raises(FormatError, match="leaves the folder"):
                reader.read(0)
