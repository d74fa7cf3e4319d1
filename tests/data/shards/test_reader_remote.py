"""Shards behind a URL, on a real S3 server: read as the local ones, ahead, and checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.core.errors import DataError, FormatError
from diptych.core.records import Manifest
from diptych.data.indexing.index import IndexParams, index
from diptych.data.shards.reader import ShardReader
from diptych.data.shards.remote import RemoteShards
from diptych.data.shards.shard import ShardParams, shard
from tests.data.conftest import Dataset, put
from tests.data.servers import Proxy

NUM_SAMPLES = 11


@pytest.fixture
def local(dataset: Dataset, tmp_path: Path) -> tuple[Path, Manifest]:
    dataset.fill(NUM_SAMPLES)
    raw_samples = dataset.write()
    sample_index, quarantine = index(raw_samples, IndexParams(), str(tmp_path / "index"))
    params = ShardParams(max_samples=4)
    return shard(sample_index, raw_samples, quarantine, params, str(tmp_path / "shards"))


def upload(s3: Proxy, local: tuple[Path, Manifest], *, bucket: str) -> ShardReader:
    folder, manifest = local
    paths = [path for part in manifest.shards for path in (part.path, part.index_path)]
    put(s3, {f"shards/{path}": (folder / path).read_bytes() for path in paths}, bucket=bucket)
    return ShardReader(f"s3://{bucket}/shards", manifest=manifest, split="train")


def test_samples_are_those_of_the_local_shards(s3: Proxy, local: tuple[Path, Manifest]) -> None:
    remote = upload(s3, local, bucket="samples")
    near = ShardReader(local[0], manifest=local[1], split="train")
    assert (remote.is_remote, near.is_remote) == (True, False)
    assert remote.keys.to_pylist() == near.keys.to_pylist()
    remote.expect(range(5))
    for row in (4, 0, 10, 2, 4, 7):
        assert remote.read(row) == near.read(row)
        assert remote.read_members(row) == near.read_members(row)
    near.expect(range(5))


def test_what_came_damaged_is_fetched_once_more(
    s3: Proxy, local: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = upload(s3, local, bucket="damaged")
    good, asked = RemoteShards.read_members, []

    def damage(self: RemoteShards, *args: object, **options: object) -> list[bytes]:
        image, text = good(self, *args, **options)
        asked.append(len(image))
        return [image if len(asked) == 2 else image[:-1] + b"?", text]

    monkeypatch.setattr(RemoteShards, "read_members", damage)
    remote.read(3).check()
    assert len(asked) == 2
    with pytest.raises(DataError, match="'toy/good-5' has the content hash"):
        remote.read(5).check()
    assert len(asked) == 4, "damage that stays is told, not fetched for ever"


def test_a_missing_shard_and_a_changed_index(s3: Proxy, local: tuple[Path, Manifest]) -> None:
    folder, manifest = local
    (folder / manifest.shards[2].path).unlink()
    (folder / manifest.shards[2].path).write_bytes(b"")
    (folder / manifest.shards[1].index_path).write_bytes(b"PAR1")
    remote = upload(s3, local, bucket="gone")
    remote.read(0).check()
    with pytest.raises(FormatError, match="not the one that the manifest names"):
        remote.read(4)
    with pytest.raises((FormatError, DataError), match=r"toy-000002\.tar"):
        remote.read(9)
