"""Shards on disk: their bytes, their names, what is kept and what is refused."""

from __future__ import annotations

import gc
import json
import tarfile
import warnings
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st

from diptych.core.errors import DataError, FormatError
from diptych.core.files import write_text
from diptych.core.hashing import sha256_file, sha256_folder
from diptych.core.records import Manifest, RawSamples
from diptych.core.tables import SHARD_INDEX
from diptych.data.index import IndexParams, index
from diptych.data.manifest import load_manifest
from diptych.data.shard import ShardParams, shard
from diptych.data.tarfmt import TarWriter, quote_stem
from tests.data.conftest import Dataset

PARAMS = ShardParams(max_samples=5)


def _shard(
    raw_samples: RawSamples, folder: Path, params: ShardParams = PARAMS
) -> tuple[Manifest, pa.Table]:
    sample_index, quarantine = index(raw_samples, IndexParams(max_quarantined_fraction=1))
    path, manifest = shard(sample_index, raw_samples, quarantine, params, str(folder))
    assert path == folder
    return manifest, sample_index


def _webdataset(folder: Path, manifest: Manifest) -> list[dict]:
    """Read all shards with webdataset, which leaves its files to the garbage collector."""
    urls = [str(folder / part.path) for part in manifest.shards]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        found = list(webdataset.WebDataset(urls, shardshuffle=False))
        gc.collect()
    return found


@pytest.fixture
def raw_samples(dataset: Dataset) -> RawSamples:
    dataset.fill(8)
    dataset.add("pair", "good-0.png", "good-1.jpg", kinds=["compare"])
    dataset.add("text", answer="nothing to see")
    for number in range(6):
        name = dataset.image(f"more-{number}.jpg", seed=100 + number)
        dataset.add(f"more-{number}", name)
    dataset.add("gone", "gone.jpg")
    return dataset.write(heldout_fraction=0.3)


def test_the_folder_and_the_manifest(raw_samples: RawSamples, tmp_path: Path) -> None:
    manifest, sample_index = _shard(raw_samples, tmp_path / "shards")
    splits = sample_index["split"].to_pylist()
    assert splits.count("train") > 5
    assert splits.count("heldout") > 0
    names = {
        path.relative_to(tmp_path / "shards").as_posix()
        for path in (tmp_path / "shards").rglob("*")
        if path.is_file()
    }
    assert names == {name for s in manifest.shards for name in (s.path, s.index_path)}
    assert {"train/toy-000000.tar", "train/toy-000001.tar", "heldout/toy-000000.tar"} <= names
    assert "train/toy-000001.parquet" in names
    for split in ("train", "heldout"):
        assert manifest.num_samples(split) == splits.count(split)
    for part in manifest.shards:
        assert part.num_bytes == (tmp_path / "shards" / part.path).stat().st_size
        assert part.sha256 == sha256_file(tmp_path / "shards" / part.path)
        assert part.index_sha256 == sha256_file(tmp_path / "shards" / part.index_path)
    assert sum(part.num_images for part in manifest.shards) == 16
    assert (manifest.num_quarantined, manifest.quarantined_by_reason) == (1, {"missing_image": 1})


def test_tars_are_plain_ustar_with_fixed_facts(raw_samples: RawSamples, tmp_path: Path) -> None:
    manifest, _ = _shard(raw_samples, tmp_path / "shards")
    for part in manifest.shards:
        path = tmp_path / "shards" / part.path
        raw = path.read_bytes()
        with tarfile.open(path) as tar:
            members = tar.getmembers()
        for member in members:
            # No extended header before it: the header is the block just before the data.
            assert member.offset + 512 == member.offset_data
            assert raw[member.offset + 257 : member.offset + 265] == b"ustar\x0000"
            assert (member.mtime, member.uid, member.gid, member.uname, member.gname) == (
                0,
                0,
                0,
                "",
                "",
            )
            assert member.isreg()


def test_the_index_says_where_the_members_are(raw_samples: RawSamples, tmp_path: Path) -> None:
    manifest, _ = _shard(raw_samples, tmp_path / "shards")
    keys = []
    for part in manifest.shards:
        table = pq.read_table(tmp_path / "shards" / part.index_path)
        assert table.schema.equals(SHARD_INDEX)
        with tarfile.open(tmp_path / "shards" / part.path) as tar:
            members = tar.getmembers()
        rows = table.to_pylist()
        assert [name for row in rows for name in row["member_names"]] == [m.name for m in members]
        assert [at for row in rows for at in row["offsets"]] == [m.offset_data for m in members]
        assert [size for row in rows for size in row["lengths"]] == [m.size for m in members]
        assert all(row["member_names"][-1].endswith(".json") for row in rows)
        keys += table["key"].to_pylist()
    assert len(keys) == len(set(keys)) == 16
    assert "toy/pair" in keys


def test_webdataset_reads_every_sample_with_its_original_bytes(
    dataset: Dataset, raw_samples: RawSamples, tmp_path: Path
) -> None:
    manifest, sample_index = _shard(raw_samples, tmp_path / "shards")
    raw = {}
    for sample in _webdataset(tmp_path / "shards", manifest):
        raw[json.loads(sample["json"])["key"]] = sample
    expected = {row["key"]: row for row in sample_index.to_pylist()}
    assert raw.keys() == expected.keys()
    for key, row in expected.items():
        assert key == f"toy/{raw[key]['__key__']}"
        suffixes = [
            f"{n}.{'jpg' if f == 'jpeg' else f}" for n, f in enumerate(row["image_formats"])
        ]
        assert {name for name in raw[key] if name[0] != "_"} == {*suffixes, "json"}
        for suffix, path in zip(suffixes, row["image_paths"], strict=True):
            assert raw[key][suffix] == (dataset.folder / "images" / path).read_bytes()
    document = json.loads(raw["toy/pair"]["json"])
    assert document == {
        "key": "toy/pair",
        "source": "toy",
        "messages": [
            {"role": "user", "text": "<image>\n<image>\nWhat is it?"},
            {"role": "assistant", "text": "a thing"},
        ],
        "kinds": ["compare"],
        "images": [
            {
                "member": "pair.0.png",
                "path": "good-0.png",
                "format": "png",
                "width_px": 10,
                "height_px": 10,
            },
            {
                "member": "pair.1.jpg",
                "path": "good-1.jpg",
                "format": "jpeg",
                "width_px": 11,
                "height_px": 11,
            },
        ],
        "content_sha256": expected["toy/pair"]["content_sha256"],
    }


def test_the_same_samples_give_the_same_bytes(raw_samples: RawSamples, tmp_path: Path) -> None:
    first, _ = _shard(raw_samples, tmp_path / "first")
    second, _ = _shard(raw_samples, tmp_path / "second")
    assert first == second
    assert first.sha256 == second.sha256
    assert sha256_folder(tmp_path / "first") == sha256_folder(tmp_path / "second")


def test_unchanged_shards_are_kept_and_stale_ones_removed(dataset: Dataset, tmp_path: Path) -> None:
    dataset.fill(17)
    folder = tmp_path / "shards"
    before, _ = _shard(dataset.write(), folder)
    stamps = {part.path: (folder / part.path).stat().st_ino for part in before.shards}
    assert len(stamps) == 4
    (folder / "train" / "notes.txt").write_text("a person's")
    (folder / "train" / ".toy-000000.tar.1.partial").write_text("left by a crash")
    dataset.rows = dataset.rows[:12]
    dataset.rows[7]["conversations"][1]["value"] = "another answer"
    after, _ = _shard(dataset.write(), folder)
    assert len(after.shards) == 3
    kept = [(folder / part.path).stat().st_ino == stamps[part.path] for part in after.shards]
    assert kept == [True, False, False]
    assert after.shards[0] == before.shards[0]
    assert sorted(path.name for path in (folder / "train").iterdir()) == sorted(
        ["notes.txt", *(f"toy-{n:06d}.{end}" for n in range(3) for end in ("tar", "parquet"))]
    )
    again, _ = _shard(dataset.write(), tmp_path / "anew")
    assert again == after


@pytest.mark.parametrize("end", ["tar", "parquet"])
@pytest.mark.parametrize("damage", [b"", b"damaged", None])
def test_a_damaged_shard_is_written_again(
    dataset: Dataset, tmp_path: Path, end: str, damage: bytes | None
) -> None:
    dataset.fill(3)
    before, _ = _shard(dataset.write(), tmp_path)
    path = tmp_path / "train" / f"toy-000000.{end}"
    whole = path.read_bytes()
    path.unlink() if damage is None else path.write_bytes(damage)
    after, _ = _shard(dataset.write(), tmp_path)
    assert path.read_bytes() == whole
    assert before == after


def test_changed_kinds_or_sizes_change_the_shard(dataset: Dataset, tmp_path: Path) -> None:
    dataset.fill(3)
    before, _ = _shard(dataset.write(), tmp_path)
    dataset.rows[0]["kinds"] = ["named"]
    after, _ = _shard(dataset.write(), tmp_path)
    assert before.shards[0].sha256 != after.shards[0].sha256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "cannot be read any more"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "has changed since"),
        (lambda path: path.write_bytes(path.read_bytes()[::-1]), "has changed since"),
    ],
)
def test_an_image_that_changed_since_the_index_stops(
    dataset: Dataset, tmp_path: Path, change, message: str
) -> None:
    dataset.fill(3)
    raw_samples = dataset.write()
    sample_index, quarantine = index(raw_samples, IndexParams())
    change(dataset.folder / "images" / "good-1.jpg")
    with pytest.raises(DataError, match=rf"good-1\.jpg' of sample 'toy/good-1' {message}"):
        shard(sample_index, raw_samples, quarantine, PARAMS, str(tmp_path / "shards"))
    assert not list((tmp_path / "shards").rglob("*.*"))


def test_a_shard_is_full_by_samples_or_by_bytes(dataset: Dataset, tmp_path: Path) -> None:
    for number in range(4):
        name = dataset.file(
            f"{number}.png",
            data=(dataset.folder / "images" / dataset.image("i.png")).read_bytes() + b"x" * 5000,
        )
        dataset.add(number, name)
    dataset.add("text")
    for params, expected in (
        (ShardParams(max_bytes=1), [1, 1, 1, 1, 1]),
        (ShardParams(max_bytes=13_000), [2, 3]),
        (ShardParams(max_samples=3), [3, 2]),
        (ShardParams(), [5]),
    ):
        manifest, _ = _shard(dataset.write(), tmp_path / "shards", params)
        assert [part.num_samples for part in manifest.shards] == expected


AWKWARD = [
    "a.b",
    "a.c",
    "a",
    "A",
    "a/b",
    "../up",
    ".hidden",
    "__meta__",
    "ä",
    "with space",
    "{a..c}",
    "*",
    "%2E",
    "x" * 300,
    "x" * 299 + "y",
    "ü" * 40,
]


def test_awkward_ids_stay_apart(dataset: Dataset, tmp_path: Path) -> None:
    name = dataset.image("a.jpg")
    for sample_id in AWKWARD:
        dataset.add(sample_id, name, answer=sample_id)
    manifest, _ = _shard(dataset.write(), tmp_path, ShardParams())
    found = [json.loads(sample["json"]) for sample in _webdataset(tmp_path, manifest)]
    assert [document["key"] for document in found] == [f"toy/{name}" for name in AWKWARD]
    assert [document["messages"][1]["text"] for document in found] == AWKWARD
    with tarfile.open(tmp_path / manifest.shards[0].path) as tar:
        assert all(member.offset + 512 == member.offset_data for member in tar)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), unique=True))
def test_stems_are_safe_and_differ(names: list[str]) -> None:
    stems = [quote_stem(name) for name in names]
    assert len(set(stems)) == len(names)
    for stem in stems:
        assert len(stem) <= 80
        assert not set(stem) - set(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_%"
        )


def test_offsets_of_members_of_any_length(tmp_path: Path) -> None:
    contents = [bytes([65 + n]) * size for n, size in enumerate([0, 1, 511, 512, 513, 5000])]
    with (tmp_path / "a.tar").open("wb") as file, TarWriter(file) as tar:
        offsets = [tar.add(f"{n}.txt", data=data) for n, data in enumerate(contents)]
    raw = (tmp_path / "a.tar").read_bytes()
    assert [raw[at : at + len(c)] for at, c in zip(offsets, contents, strict=True)] == contents


def test_an_empty_split_has_no_shard(dataset: Dataset, tmp_path: Path) -> None:
    dataset.fill(2)
    manifest, _ = _shard(dataset.write(), tmp_path)
    assert {part.split for part in manifest.shards} == {"train"}
    assert not (tmp_path / "heldout").exists()


def test_a_manifest_is_read_back_or_refused(raw_samples: RawSamples, tmp_path: Path) -> None:
    manifest, _ = _shard(raw_samples, tmp_path / "shards")
    path = tmp_path / "manifest.json"
    write_text(path, text=manifest.model_dump_json())
    assert load_manifest(path) == manifest
    assert load_manifest(path).sha256 == manifest.sha256
    write_text(path, text=manifest.model_copy(update={"version": 99}).model_dump_json())
    with pytest.raises(FormatError, match=r"version 99.*Allowed: 1.*prepare"):
        load_manifest(path)
    write_text(path, text=manifest.model_dump_json()[:-5])
    with pytest.raises(FormatError, match="damaged"):
        load_manifest(path)
    with pytest.raises(FormatError, match="no manifest"):
        load_manifest(tmp_path / "nowhere.json")
