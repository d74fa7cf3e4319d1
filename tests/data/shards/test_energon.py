"""Shards as Megatron-Energon wants them; with Energon itself where its environment is there."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import tarfile
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from diptych.core.errors import ConfigError, FormatError
from diptych.core.files import write_text
from diptych.core.hashing import sha256_file, sha256_folder
from diptych.core.records import Manifest
from diptych.data.shards.energon import export_energon
from diptych.data.shards.shard import ShardParams, shard
from tests.data.indexed import Indexed

PEER = Path(__file__).parents[3] / "benchmarks" / ".peers" / "energon"

READ = """
import hashlib, json, sys
from megatron.energon import (
    Cooker, CrudeSample, DefaultTaskEncoder, TextSample, WorkerConfig, basic_sample_keys,
    get_loader, get_train_dataset, get_val_dataset, stateless,
)

@stateless
def cook(sample: CrudeSample) -> TextSample:
    parts = {
        name: hashlib.sha256(value).hexdigest()
        for name, value in sample.items() if not name.startswith("__")
    }
    return TextSample(**basic_sample_keys(sample), text=json.dumps(parts))

class Encoder(DefaultTaskEncoder):
    decoder = None
    cookers = [Cooker(cook)]

config = WorkerConfig(rank=0, world_size=1, num_workers=0)
options = dict(worker_config=config, batch_size=1, task_encoder=Encoder())
train = get_train_dataset(
    sys.argv[1], shuffle_buffer_size=None, max_samples_per_sequence=None, repeat=False, **options
)
val = get_val_dataset(sys.argv[1], split_part="val", **options)
found = {
    name: {batch.__key__[0]: json.loads(batch.text[0]) for batch in get_loader(dataset)}
    for name, dataset in (("train", train), ("val", val))
}
print("FOUND " + json.dumps(found))
"""


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Indexed, Manifest, Path]:
    indexed = Indexed(tmp_path / "raw")
    indexed.fill(30, source="zoo")
    indexed.fill(20, source="art-1")
    indexed.add("a.b/c", b"first" * 300, b"second", source="zoo", formats=("png", "webp"))
    indexed.add("text", source="zoo")
    sample_index, raw_samples = indexed.write()
    shards, manifest = shard(
        sample_index,
        raw_samples,
        indexed.quarantine,
        ShardParams(max_samples=5),
        str(tmp_path / "shards"),
    )
    before = sha256_folder(shards)
    assert export_energon(manifest, shards=shards, folder=tmp_path / "out") == tmp_path / "out"
    assert sha256_folder(shards) == before
    return indexed, manifest, tmp_path


def read_tables(path: Path) -> dict[str, list[tuple]]:
    """Read every row, and how every table and index was made, without their order or spaces."""
    database = sqlite3.connect(path)
    try:
        tables = {
            name: sorted(database.execute(f"SELECT * FROM {name}").fetchall())
            for name in ("samples", "sample_parts")
        }
        made = database.execute("SELECT name, sql FROM sqlite_master").fetchall()
    finally:
        database.close()
    tables["made"] = sorted((name, "".join((sql or "").split())) for name, sql in made)
    return tables


def test_links_and_offsets(exported: tuple[Indexed, Manifest, Path]) -> None:
    _, manifest, root = exported
    rows = []
    for number, part in enumerate(sorted(manifest.shards, key=lambda part: part.path)):
        link = root / "out" / part.path
        assert link.is_symlink()
        assert not link.readlink().is_absolute()
        assert link.read_bytes() == (root / "shards" / part.path).read_bytes()
        with tarfile.open(link) as tar:
            members = tar.getmembers()
            end = tar.offset
        stems = [member.name.split(".")[0] for member in members]
        firsts = [n for n, stem in enumerate(stems) if stem not in stems[:n]]
        starts = [*(members[n].offset for n in firsts), end]
        found = np.fromfile(link.with_name(f"{link.name}.idx"), dtype=np.uint64)
        assert found.tolist() == starts
        for place, first in enumerate(firsts):
            size = starts[place + 1] - starts[place]
            rows.append((number, stems[first], place, starts[place], size))
    tables = read_tables(root / "out" / ".nv-meta" / "index.sqlite")
    assert tables["samples"] == sorted(rows)
    assert len(tables["sample_parts"]) == 50 * 2 + 3 + 1


def test_settings(exported: tuple[Indexed, Manifest, Path]) -> None:
    _, manifest, root = exported
    meta = root / "out" / ".nv-meta"
    counts = json.loads((meta / ".info.json").read_text())["shard_counts"]
    assert counts == {part.path: part.num_samples for part in manifest.shards}
    assert list(counts) == sorted(counts)
    splits = json.loads((meta / "split.yaml").read_text())
    assert splits["exclude"] == []
    for name, split in (("train", "train"), ("val", "heldout")):
        expected = sorted(part.path for part in manifest.shards if part.split == split)
        assert splits["split_parts"][name] == expected


def test_an_export_again_replaces_the_former_but_for_a_persons_dataset(
    exported: tuple[Indexed, Manifest, Path],
) -> None:
    indexed, manifest, root = exported
    indexed.rows = indexed.rows[:40]
    write_text(root / "out" / ".nv-meta" / "dataset.yaml", text="a person's")
    shards, fewer = shard(
        *indexed.write(), indexed.quarantine, ShardParams(max_samples=5), str(root / "shards")
    )
    export_energon(fewer, shards=shards, folder=root / "out")
    export_energon(fewer, shards=shards, folder=root / "anew")
    dataset = root / "out" / ".nv-meta" / "dataset.yaml"
    assert dataset.read_text() == "a person's"
    shutil.copy(root / "anew" / ".nv-meta" / "dataset.yaml", dataset)
    assert len(fewer.shards) < len(manifest.shards)
    assert sha256_folder(root / "out") == sha256_folder(root / "anew")


def test_what_cannot_be_exported(exported: tuple[Indexed, Manifest, Path]) -> None:
    _, manifest, root = exported
    with pytest.raises(ConfigError, match=r"cannot go into the folder of shards.*energon"):
        export_energon(manifest, shards=root / "shards", folder=root / "shards")
    index = root / "shards" / manifest.shards[0].index_path
    index.write_bytes(b"damaged")
    with pytest.raises(FormatError, match=r"zoo-000000\.parquet' is not the one.*prepare"):
        export_energon(manifest, shards=root / "shards", folder=root / "other")
    index.unlink()
    with pytest.raises(FormatError, match=r"zoo-000000\.parquet' cannot be read.*prepare"):
        export_energon(manifest, shards=root / "shards", folder=root / "other")
    assert not (root / "other" / ".nv-meta").exists()


@pytest.fixture
def peer() -> Path:
    if not (PEER / ".installed").exists():
        pytest.skip("Energon's environment is not there: make it with `make bench NAME=prepare`")
    return PEER / "bin"


@pytest.mark.slow
def test_the_files_are_those_of_energon_prepare(
    exported: tuple[Indexed, Manifest, Path], peer: Path
) -> None:
    _, manifest, root = exported
    ours, theirs = root / "out", root / "theirs"
    for part in manifest.shards:
        (theirs / part.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / "shards" / part.path, theirs / part.path)
    options = ["--non-interactive", "--num-workers", "1", "--sample-type", "CrudeWebdataset"]
    splits = ["--split-parts", "train:train/.*", "--split-parts", "val:heldout/.*"]
    subprocess.run(
        [peer / "energon", "prepare", *options, *splits, theirs],
        check=True,
        capture_output=True,
        timeout=240,
    )
    assert {path.relative_to(theirs) for path in theirs.rglob("*")} == {
        path.relative_to(ours) for path in ours.rglob("*")
    }
    for part in manifest.shards:
        name = f"{part.path}.idx"
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    meta = Path(".nv-meta")
    name = meta / ".info.json"
    assert (ours / name).read_text() == (theirs / name).read_text()
    for name in ("split.yaml", "dataset.yaml"):
        found = [
            json.loads(
                subprocess.check_output(
                    [peer / "python", "-c", EXPAND, folder / meta / name], text=True
                )
            )
            for folder in (ours, theirs)
        ]
        assert found[0] == found[1]
    assert read_tables(ours / meta / "index.sqlite") == read_tables(theirs / meta / "index.sqlite")


EXPAND = """
import json, sys, braceexpand, yaml
value = yaml.safe_load(open(sys.argv[1]))
for name, paths in value.get("split_parts", {}).items():
    value["split_parts"][name] = [p for path in paths for p in braceexpand.braceexpand(path)]
print(json.dumps(value))
"""


@pytest.mark.slow
def test_energon_reads_every_sample(exported: tuple[Indexed, Manifest, Path], peer: Path) -> None:
    indexed, _, root = exported
    script = root / "read.py"
    script.write_text(READ)
    done = subprocess.run(
        [peer / "python", script, root / "out"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    found = json.loads(line.removeprefix("FOUND "))
    for name, split in (("train", "train"), ("val", "heldout")):
        expected = [row for row in indexed.rows if row["split"] == split]
        assert len(found[name]) == len(expected)
        images = sorted(
            [sha256_file(indexed.image(path)) for path in row["image_files"]] for row in expected
        )
        assert images == sorted(
            [parts[key] for key in sorted(parts) if key != "json"] for parts in found[name].values()
        )
    assert found["train"]["zoo/a%2Eb%2Fc"].keys() == {"0.png", "1.webp", "json"}
    assert found["train"]["zoo/a%2Eb%2Fc"]["1.webp"] == sha256(b"second").hexdigest()
