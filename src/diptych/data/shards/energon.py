"""Let Megatron-Energon read the shards: a folder of links to them and the index files it wants.

In: the shards' own indexes and the manifest. Out: a folder that Energon takes as prepared by
`energon prepare`, with our train and heldout as its train and val. No tar is read for that, and
nothing of Energon is imported.
"""

from __future__ import annotations

import json
import os
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from diptych.core.errors import ConfigError, DataError, FormatError
from diptych.core.files import inside, replacing, replacing_folder, write_text
from diptych.core.records import Manifest, Shard
from diptych.data.shards.tables import CURE, ShardIndex, parse_index
from diptych.data.shards.tarfmt import BLOCK_BYTES, padded

ENERGON_VERSION = "7.4.1"
"""The version whose files these are."""

META_FOLDER = ".nv-meta"
_SPLITS = {"train": "train", "val": "heldout"}
_DATASET = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
# As `energon prepare` makes them: its reader asks for these tables by name.
_TABLES = """
CREATE TABLE samples (
    tar_file_id INTEGER NOT NULL,
    sample_key TEXT NOT NULL UNIQUE,
    sample_index INTEGER NOT NULL,
    byte_offset INTEGER,
    byte_size INTEGER
);
CREATE TABLE sample_parts (
    tar_file_id INTEGER,
    sample_index INTEGER,
    part_name TEXT,
    content_byte_offset INTEGER,
    content_byte_size INTEGER
);
"""
_INDEXES = """
CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq
    ON sample_parts(tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full ON sample_parts(
    tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size
);
"""


def export_energon(manifest: Manifest, *, shards: Path, folder: Path) -> Path:
    """Make a folder that Energon reads as a prepared dataset of crude samples.

    Args:
        manifest: The shards.
        shards: Their folder; it stays as it is.
        folder: Where the links and index files go. What an earlier export left there is replaced,
            but for `.nv-meta/dataset.yaml`, which is a person's to change.

    Raises:
        ConfigError: `folder` is the shards' own.
        FormatError: A shard's index is missing or damaged.
    """
    if folder.resolve() == shards.resolve():
        raise ConfigError(
            f"Energon's files cannot go into the folder of shards, '{shards}'",
            allowed="Any other folder: it gets links to the shards",
            cure=f"Name another one, such as '{shards.with_name('energon')}'",
        )
    # `energon prepare` numbers the tars in this order.
    ordered = sorted(manifest.shards, key=lambda shard: shard.path)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing_folder(folder / META_FOLDER) as meta:
        _write_settings(meta, manifest=manifest, ordered=ordered)
        kept = folder / META_FOLDER / "dataset.yaml"
        text = kept.read_text("utf-8") if kept.is_file() else _as_yaml(_DATASET)
        write_text(meta / "dataset.yaml", text=text)
        with _open_database(meta / "index.sqlite") as database:
            for number, shard in enumerate(ordered):
                names, index = _read_index(shards, shard=shard)
                _insert(database, names=names, index=index, number=number)
                _link(folder / shard.path, target=inside(shard.path, folder=shards))
                with replacing(folder / f"{shard.path}.idx") as partial:
                    partial.write_bytes(_starts(index).astype(np.uint64).tobytes())
    _remove_stale(folder, manifest=manifest)
    return folder


def _write_settings(meta: Path, *, manifest: Manifest, ordered: list[Shard]) -> None:
    info = {
        "energon_version": ENERGON_VERSION,
        "shard_counts": {shard.path: shard.num_samples for shard in ordered},
    }
    write_text(meta / ".info.json", text=json.dumps(info, indent=2))
    parts = {
        name: [shard.path for shard in ordered if shard.split == split]
        for name, split in _SPLITS.items()
    }
    write_text(meta / "split.yaml", text=_as_yaml({"split_parts": parts, "exclude": []}))
    write_text(meta / "index.uuid", text=str(uuid.uuid5(uuid.NAMESPACE_OID, manifest.sha256)))


def _as_yaml(value: object) -> str:
    """Write JSON, which is YAML too."""
    return json.dumps(value, indent=2) + "\n"


@contextmanager
def _open_database(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a database with Energon's tables; indexes are made at the end, which is faster."""
    with closing(sqlite3.connect(path)) as database:
        # It is made under a temporary name: what a crash leaves is thrown away.
        database.executescript(f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; {_TABLES}")
        yield database
        database.commit()
        database.executescript(_INDEXES)


def _starts(index: ShardIndex) -> np.ndarray:
    """Return where each sample begins in its tar, and where the last one ends, [rows + 1] bytes."""
    end = index.offsets[-1] + padded(index.lengths[-1])
    firsts = np.asarray(index.first_members)[:-1]
    return np.append(np.asarray(index.offsets)[firsts] - BLOCK_BYTES, end)


def _insert(
    database: sqlite3.Connection, *, names: list[str], index: ShardIndex, number: int
) -> None:
    """Add the samples of tar `number`; `names` are its members'."""
    stems, _, parts = zip(*(name.partition(".") for name in names), strict=True)
    firsts, starts = index.first_members[:-1].tolist(), _starts(index)
    keys = (stems[first] for first in firsts)
    samples = zip(
        keys, range(len(firsts)), starts[:-1].tolist(), np.diff(starts).tolist(), strict=True
    )
    database.executemany(
        "INSERT INTO samples VALUES (?, ?, ?, ?, ?)", ((number, *sample) for sample in samples)
    )
    places = np.repeat(np.arange(len(firsts)), np.diff(index.first_members)).tolist()
    members = zip(places, parts, index.offsets.tolist(), index.lengths.tolist(), strict=True)
    database.executemany(
        "INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", ((number, *member) for member in members)
    )


def _link(path: Path, *, target: Path) -> None:
    """Point `path` at the tar, by a relative link: both folders can be moved together."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.symlink_to(os.path.relpath(target.resolve(), path.parent.resolve()))


def _read_index(folder: Path, *, shard: Shard) -> tuple[list[str], ShardIndex]:
    """Read a shard's index, and its members' names."""
    try:
        data = inside(shard.index_path, folder=folder).read_bytes()
    except (OSError, DataError) as error:
        raise FormatError(
            f"The index '{shard.index_path}' cannot be read: {error}", cure=CURE
        ) from error
    index = parse_index(data, shard=shard)
    table = pq.ParquetFile(pa.BufferReader(data)).read(columns=["member_names"])
    return table["member_names"].combine_chunks().flatten().to_pylist(), index


def _remove_stale(folder: Path, *, manifest: Manifest) -> None:
    """Delete links and index files of shards that are no more."""
    current = {shard.path for shard in manifest.shards}
    for split in _SPLITS.values():
        for path in (folder / split).glob("*.tar"):
            if path.is_symlink() and f"{split}/{path.name}" not in current:
                path.unlink()
                path.with_name(f"{path.name}.idx").unlink(missing_ok=True)
