"""Shards on disk: what they hold, what is kept and what is refused."""

from __future__ import annotations

import gc
import json
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset

from diptych.core.errors import DataError, FormatError
from diptych.core.files import write_text
from diptych.core.hashing import sha256_file, sha256_folder
from diptych.core.records import Manifest, RawSamples
from diptych.core.tables import SHARD_INDEX
from diptych.data.shards.manifest import load_manifest, shard_urls
from diptych.data.shards.shard import ShardParams, shard
from tests.data.indexed import Indexed

PARAMS = ShardParams(max_samples=5)


@pytest.fixture
def indexed(tmp_path: Path) -> Indexed:
    return Indexed(tmp_path / "raw")


@pytest.fixture
def mixed(indexed: Indexed) -> Indexed:
    """24 samples: one and two images, none, and two splits."""
    indexed.fill(20)
    indexed.add("pair", b"first" * 300, b"second" * 300, formats=("png", "jpeg"))
    indexed.add("text", answer="nothing to see")
    indexed.add("many", *[b"%d" % n for n in range(12)])
    indexed.add("tiny", b"")
    indexed.refuse("toy", "missing_image")
    indexed.refuse("toy", "empty_answer")
    indexed.refuse("toy", "missing_image")
    indexed.refuse("another", "damaged_part")
    return indexed


def run(indexed: Indexed, folder: Path, params: ShardParams = PARAMS, **layout: int) -> Manifest:
    sample_index, raw_samples = indexed.write(**layout)
    path, manifest = shard(sample_index, raw_samples, indexed.quarantine, params, str(folder))
    assert path == folder
    return manifest


def read_with_webdataset(folder: Path, manifest: Manifest) -> list[dict[str, Any]]:
    """Read all shards with webdataset, which leaves its files to the garbage collector."""
    urls = [
        url
        for split in ("train", "heldout")
        for url in shard_urls(manifest, folder=folder, split=split)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        found = list(webdataset.WebDataset(urls, shardshuffle=False))
        gc.collect()
    return found


def test_the_folder_and_the_manifest(mixed: Indexed, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    manifest = run(mixed, folder)
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == {name for part in manifest.shards for name in (part.path, part.index_path)}
    assert [part.path for part in manifest.shards] == [
        *(f"train/toy-{n:06d}.tar" for n in range(4)),
        "heldout/toy-000000.tar",
    ]
    assert [part.num_samples for part in manifest.shards] == [5, 5, 5, 4, 5]
    assert sum(part.num_images for part in manifest.shards) == 20 + 2 + 12 + 1
    for part in manifest.shards:
        assert (folder / part.path).stat().st_size == part.num_bytes
        assert sha256_file(folder / part.path) == part.sha256
        assert sha256_file(folder / part.index_path) == part.index_sha256
    assert manifest.num_samples("heldout") == 5
    assert list(manifest.quarantined.items()) == [
        ("another", {"damaged_part": 1}),
        ("toy", {"empty_answer": 1, "missing_image": 2}),
    ]
    assert list(manifest.quarantined["toy"]) == ["empty_answer", "missing_image"]
    assert manifest.num_quarantined == 4


def test_splits_then_sources_then_numbers_order_the_manifest(
    indexed: Indexed, tmp_path: Path
) -> None:
    indexed.fill(12, source="zoo")
    indexed.fill(12, source="art")
    manifest = run(indexed, tmp_path / "shards")
    assert [part.path for part in manifest.shards] == [
        "train/zoo-000000.tar",
        "train/zoo-000001.tar",
        "train/art-000000.tar",
        "train/art-000001.tar",
        "heldout/zoo-000000.tar",
        "heldout/art-000000.tar",
    ]
    assert manifest.sources == ("zoo", "art")


def test_the_index_says_where_the_members_are(mixed: Indexed, tmp_path: Path) -> None:
    manifest = run(mixed, tmp_path / "shards")
    found = []
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
        found += rows
    expected = {row["key"]: row for row in mixed.rows}
    assert {row["key"] for row in found} == expected.keys()
    assert len(found) == len(expected)
    for row in found:
        for name in ("widths_px", "heights_px", "text_bytes", "content_hash"):
            assert row[name] == expected[row["key"]][name]


def test_webdataset_reads_every_sample_with_its_original_bytes(
    mixed: Indexed, tmp_path: Path
) -> None:
    manifest = run(mixed, tmp_path / "shards")
    found = {
        json.loads(sample["json"])["key"]: sample
        for sample in read_with_webdataset(tmp_path / "shards", manifest)
    }
    expected = {row["key"]: row for row in mixed.rows}
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        assert found[key]["__key__"] == key
        suffixes = [
            f"{n}.{'jpg' if name == 'jpeg' else name}"
            for n, name in enumerate(row["image_formats"])
        ]
        assert {name for name in found[key] if name[0] != "_"} == {*suffixes, "json"}
        for suffix, path in zip(suffixes, row["image_files"], strict=True):
            assert found[key][suffix] == mixed.image(path).read_bytes()
    assert json.loads(found["toy/pair"]["json"]) == {
        "key": "toy/pair",
        "source": "toy",
        "messages": json.loads(expected["toy/pair"]["messages"]),
        "kinds": [],
        "images": [
            {
                "member": f"toy/pair.{place}.{suffix}",
                "path": expected["toy/pair"]["image_names"][place],
                "format": format,
                "width_px": 20,
                "height_px": 10,
            }
            for place, (suffix, format) in enumerate([("png", "png"), ("jpg", "jpeg")])
        ],
        "content_hash": expected["toy/pair"]["content_hash"],
    }


def test_the_same_samples_give_the_same_bytes_however_the_index_is_cut(
    mixed: Indexed, tmp_path: Path
) -> None:
    whole = run(mixed, tmp_path / "whole", part_rows=1_000, group_rows=1_000)
    for number, layout in enumerate([(1, 1), (7, 3), (24, 5)]):
        folder = tmp_path / str(number)
        again = run(mixed, folder, part_rows=layout[0], group_rows=layout[1])
        assert again.sha256 == whole.sha256
        assert sha256_folder(folder) == sha256_folder(tmp_path / "whole")


def test_two_processes_write_the_bytes_of_one(mixed: Indexed, tmp_path: Path) -> None:
    one = run(mixed, tmp_path / "one", ShardParams(max_samples=5, num_processes=1))
    two = run(mixed, tmp_path / "two", ShardParams(max_samples=5, num_processes=2))
    assert one == two
    assert sha256_folder(tmp_path / "one") == sha256_folder(tmp_path / "two")


def test_unchanged_shards_are_kept_and_stale_ones_removed(indexed: Indexed, tmp_path: Path) -> None:
    for number in range(17):
        indexed.add(f"id-{number}", b"%d" % number, answer=str(number))
    folder = tmp_path / "shards"
    before = run(indexed, folder)
    stamps = {part.path: (folder / part.path).stat().st_ino for part in before.shards}
    assert len(stamps) == 4
    (folder / "train" / "notes.txt").write_text("a person's")
    (folder / "train" / ".toy-000000.tar.1.partial").write_text("left by a crash")
    indexed.rows = indexed.rows[:12]
    indexed.rows[7]["messages"] = indexed.rows[7]["messages"].replace('"7"', '"another"')
    after = run(indexed, folder)
    assert len(after.shards) == 3
    kept = [(folder / part.path).stat().st_ino == stamps[part.path] for part in after.shards]
    assert kept == [True, False, False]
    assert after.shards[0] == before.shards[0]
    assert sorted(path.name for path in (folder / "train").iterdir()) == sorted(
        ["notes.txt", *(f"toy-{n:06d}.{end}" for n in range(3) for end in ("tar", "parquet"))]
    )
    assert run(indexed, tmp_path / "anew") == after


def test_another_source_leaves_the_shards_of_the_first_alone(
    indexed: Indexed, tmp_path: Path
) -> None:
    folder = tmp_path / "shards"
    indexed.fill(12, source="first")
    before = run(indexed, folder)
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("first-*")}
    assert len(files) == 2 * len(before.shards)
    indexed.fill(12, source="second")
    both = run(indexed, folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("first-*")} == files
    assert [part for part in both.shards if part.source == "first"] == list(before.shards)
    indexed.rows = indexed.rows[:12]
    assert run(indexed, folder) == before
    assert {path for path in folder.rglob("*") if path.is_file()} == files.keys()


@pytest.mark.parametrize("end", ["tar", "parquet"])
@pytest.mark.parametrize("damage", [b"", b"damaged", None, "one byte"])
def test_a_damaged_shard_is_written_again(
    indexed: Indexed, tmp_path: Path, end: str, damage: bytes | str | None
) -> None:
    indexed.fill(3)
    before = run(indexed, tmp_path)
    path = tmp_path / "train" / f"toy-000000.{end}"
    whole = path.read_bytes()
    if damage is None:
        path.unlink()
    elif isinstance(damage, str):
        # Among a column's data: the table's description at the end stays whole.
        path.write_bytes(whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])
    else:
        path.write_bytes(damage)
    after = run(indexed, tmp_path)
    assert path.read_bytes() == whole
    assert before == after


def test_what_a_sample_says_beside_its_content_changes_the_shard(
    indexed: Indexed, tmp_path: Path
) -> None:
    indexed.fill(3)
    before = run(indexed, tmp_path)
    indexed.rows[0]["kinds"] = ["named"]
    after = run(indexed, tmp_path)
    assert before.shards[0].sha256 != after.shards[0].sha256


@pytest.mark.parametrize(
    ("num_processes", "change", "message"),
    [
        (1, lambda path: path.unlink(), "cannot be read any more"),
        (2, lambda path: path.unlink(), "cannot be read any more"),
        (1, lambda path: path.write_bytes(path.read_bytes() + b"x"), "has changed since"),
        (1, lambda path: path.write_bytes(path.read_bytes()[::-1]), "has changed since"),
        (1, lambda path: path.write_bytes(path.read_bytes()[:9]), "has changed since"),
    ],
)
def test_an_image_that_changed_since_the_index_stops(
    indexed: Indexed, tmp_path: Path, num_processes: int, change, message: str
) -> None:
    indexed.fill(3)
    written = indexed.write()
    change(indexed.image("toy-1-0.img"))
    params = ShardParams(num_processes=num_processes)
    with pytest.raises(DataError, match=rf"'toy-1-0\.img' of sample 'toy/id-1' ({message})"):
        shard(*written, indexed.quarantine, params, str(tmp_path / "shards"))
    assert not list((tmp_path / "shards").rglob("*.*"))


def test_a_shard_is_full_by_samples_or_by_bytes(indexed: Indexed, tmp_path: Path) -> None:
    for number in range(4):
        indexed.add(str(number), b"x" * 5_000)
    indexed.add("text")
    for params, expected in (
        (ShardParams(max_bytes=1), [1, 1, 1, 1, 1]),
        (ShardParams(max_bytes=11_000), [2, 3]),
        (ShardParams(max_bytes=5_100), [1, 1, 1, 2]),
        (ShardParams(max_samples=3), [3, 2]),
        (ShardParams(), [5]),
    ):
        manifest = run(indexed, tmp_path / "shards", params)
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


def test_awkward_ids_stay_apart(indexed: Indexed, tmp_path: Path) -> None:
    for name in AWKWARD:
        indexed.add(name, name.encode(), source="s" * 64, answer=name)
    manifest = run(indexed, tmp_path, ShardParams())
    samples = read_with_webdataset(tmp_path, manifest)
    found = [json.loads(sample["json"]) for sample in samples]
    assert [document["key"] for document in found] == [f"{'s' * 64}/{name}" for name in AWKWARD]
    assert [document["messages"][1]["text"] for document in found] == AWKWARD
    assert [sample["0.jpg"] for sample in samples] == [name.encode() for name in AWKWARD]
    with tarfile.open(tmp_path / manifest.shards[0].path) as tar:
        assert all(member.offset + 512 == member.offset_data for member in tar)


def test_an_empty_split_has_no_shard(indexed: Indexed, tmp_path: Path) -> None:
    indexed.fill(3)
    manifest = run(indexed, tmp_path)
    assert {part.split for part in manifest.shards} == {"train"}
    assert not (tmp_path / "heldout").exists()


def test_the_tars_of_a_split_for_webdataset(mixed: Indexed, tmp_path: Path) -> None:
    manifest = run(mixed, tmp_path)
    assert shard_urls(manifest, folder=tmp_path, split="heldout") == [
        f"{tmp_path}/heldout/toy-000000.tar"
    ]
    urls = shard_urls(manifest, folder="https://example.org/shards/", split="train")
    assert urls[1] == "https://example.org/shards/train/toy-000001.tar"
    assert len(urls) == 4


def test_a_manifest_is_read_back_or_refused(mixed: Indexed, tmp_path: Path) -> None:
    manifest = run(mixed, tmp_path / "shards")
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


def test_images_in_a_table_are_read_in_order(
    indexed: Indexed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [b"%d " % number * 400 for number in range(120)]
    for number, data in enumerate(images):
        indexed.add(f"id-{number}", data, split="heldout" if number % 3 == 0 else "train")
        row = indexed.rows[-1]
        row["image_files"], row["image_offsets"] = ["table.parquet"], [number]
    sample_index, raw_samples = indexed.write(part_rows=50)
    cells = [{"bytes": data, "path": None} for data in images]
    pq.write_table(
        pa.table({"image": cells}), indexed.folder / "images" / "table.parquet", row_group_size=30
    )
    source = raw_samples.sources[0].model_copy(update={"kind": "parquet"})
    reads = []
    iter_batches = pq.ParquetFile.iter_batches

    def count(self, *args, **options):
        if options["columns"] == ["image"]:
            reads.append(options["row_groups"])
        return iter_batches(self, *args, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", count)
    _, manifest = shard(
        sample_index,
        RawSamples(sources=(source,)),
        indexed.quarantine,
        ShardParams(max_samples=20),
        str(tmp_path / "shards"),
    )
    # Two splits go through four row groups; each of the 6 shards opens the table anew.
    assert len(manifest.shards) == 6
    assert len(reads) <= 2 * (4 + 6)
    found = read_with_webdataset(tmp_path / "shards", manifest)
    assert sorted(sample["0.jpg"] for sample in found) == sorted(images)
