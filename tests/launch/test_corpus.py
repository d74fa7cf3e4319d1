"""Shards that are missing, cut or changed, and what both splits share."""

from __future__ import annotations

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diptych.launch import corpus as looking
from diptych.launch.corpus import Depth, check_corpus, check_files, check_splits


@pytest.fixture
def copied(corpus, tmp_path):
    shards = tmp_path / "shards"
    shutil.copytree(corpus.shards, shards)
    return shards


def _files(corpus, folder, *, hashes=False):
    return check_files(corpus.manifest.shards, folder=folder, hashes=hashes)


def test_whole_shards_pass(corpus, copied):
    check = _files(corpus, copied)
    assert check.status == "pass"
    assert check.found.startswith(f"{len(corpus.manifest.shards)} shards are there, ")
    assert "hashed" not in check.found
    assert (
        f"; {len(corpus.manifest.shards)} of them hashed"
        in _files(corpus, copied, hashes=True).found
    )


def test_a_missing_shard_is_named(corpus, copied):
    gone = corpus.manifest.shards[1]
    (copied / gone.path).unlink()
    (copied / gone.index_path).unlink()
    check = _files(corpus, copied)
    assert (check.status, check.found) == (
        "fail",
        f"{gone.path}, {gone.index_path} not in {copied}",
    )
    assert "kedro run --pipelines=prepare" in check.cure


def test_many_missing_shards_are_counted(corpus, tmp_path):
    found = _files(corpus, tmp_path).found
    assert f"and {2 * len(corpus.manifest.shards) - 3} more not in" in found


def test_a_shard_of_another_size_is_named(corpus, copied):
    cut = corpus.manifest.shards[0]
    with (copied / cut.path).open("r+b") as file:
        file.truncate(1000)
    check = _files(corpus, copied)
    assert check.status == "fail"
    assert check.found == f"{cut.path} has 1000 bytes instead of {cut.num_bytes}"


def test_a_changed_byte_is_found_by_its_hash_alone(corpus, copied):
    changed = corpus.manifest.shards[0]
    with (copied / changed.path).open("r+b") as file:
        file.seek(700)
        byte = file.read(1)
        file.seek(700)
        file.write(bytes([byte[0] ^ 1]))
    assert _files(corpus, copied).status == "pass"
    check = _files(corpus, copied, hashes=True)
    assert check.found == f"{changed.path} changed since the manifest was written"


def test_of_large_data_some_shards_are_hashed(corpus, copied, monkeypatch):
    shards = corpus.manifest.shards
    total = sum(shard.num_bytes for shard in shards)
    monkeypatch.setattr(looking, "_HASHED_BYTES", total // 3 + 1)
    assert f"; {-(-len(shards) // 3)} of them hashed" in _files(corpus, copied, hashes=True).found


def test_remote_shards_are_left_to_their_reader(corpus):
    checks = list(check_corpus(corpus.manifest, shards="https://host/x", depth=Depth(hashes=True)))
    assert [check.status for check in checks] == ["skip", "skip"]


def _splits(corpus, folder, **depth):
    return check_splits(corpus.manifest, shards=str(folder), depth=Depth(**depth))


def test_splits_that_share_nothing_pass(corpus):
    check = _splits(corpus, corpus.shards, sample_index=corpus.sample_index)
    assert check.status == "pass"
    assert check.found == "80 for training, 24 held out; no content or image is in both"
    assert _splits(corpus, corpus.shards).found.endswith("; no content is in both")


def test_a_content_that_is_in_both_fails(corpus, copied):
    train, heldout = (
        next(shard for shard in corpus.manifest.shards if shard.split == split)
        for split in ("train", "heldout")
    )
    seen = pq.read_table(copied / train.index_path)["content_hash"].to_pylist()
    table = pq.read_table(copied / heldout.index_path)
    place = table.schema.get_field_index("content_hash")
    rows = table["content_hash"].to_pylist()
    rows[:2] = seen[:2]
    leaked = table.set_column(place, table.schema.field(place), [pa.array(rows)])
    pq.write_table(leaked, copied / heldout.index_path)
    check = _splits(corpus, copied)
    assert check.status == "fail"
    assert check.found.endswith("and 2 contents are in both")


@pytest.mark.parametrize(("leakage", "status"), [("images", "fail"), ("content", "warn")])
def test_an_image_that_is_in_both_fails_unless_it_is_allowed(corpus, tmp_path, leakage, status):
    table = pa.table(
        {
            "split": ["train", "heldout", "heldout"],
            "image_hashes": [["a", "b"], ["b"], ["c", "b"]],
        }
    )
    pq.write_table(table, tmp_path / "part.parquet")
    check = _splits(corpus, corpus.shards, sample_index=tmp_path, leakage=leakage)
    assert check.status == status
    assert check.found.endswith("and 1 images are in both")


def test_no_held_out_sample_is_a_warning(corpus):
    shards = tuple(shard for shard in corpus.manifest.shards if shard.split == "train")
    manifest = corpus.manifest.model_copy(update={"shards": shards})
    check = check_splits(manifest, shards=str(corpus.shards), depth=Depth())
    assert check.status == "warn"
    assert check.found.startswith("80 for training, 0 held out")


def test_an_index_that_cannot_be_read_fails(corpus, copied):
    (copied / corpus.manifest.shards[0].index_path).write_bytes(b"no parquet")
    check = _splits(corpus, copied)
    assert check.status == "fail"
    assert "cannot be read" in check.found


def test_much_data_is_not_read_in_a_hurry(corpus, monkeypatch):
    monkeypatch.setattr(looking, "_QUICK_SAMPLES", 100)
    assert _splits(corpus, corpus.shards).status == "skip"
    assert _splits(corpus, corpus.shards, sample_index=corpus.sample_index).status == "pass"
