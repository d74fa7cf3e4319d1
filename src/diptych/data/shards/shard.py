"""Write shards: tars that webdataset reads, an index beside each, and the manifest over all.

In: `sample_index` and the raw images. Out: `<split>/<source>-000000.tar`, `.parquet` beside it, and
`manifest`. The same samples give the same bytes however many processes write them; a shard whose
samples have not changed is kept, so that a run that was killed goes on where it was. Images are
copied as they are: nothing here decodes, and nothing knows of tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from diptych.core.errors import DataError
from diptych.core.files import replacing
from diptych.core.hashing import canonical_json, sha256_file, xxh3_bytes
from diptych.core.records import FORMAT_VERSION, Manifest, RawSamples, RawSource, Shard
from diptych.core.tables import SHARD_INDEX
from diptych.data.executor import LOCAL, ExecutorParams, opened_pool
from diptych.data.reasons import Refused
from diptych.data.shards.cut import Cut, ShardParams, Split, cut, read_rows
from diptych.data.shards.tarfmt import lay_out, quote_key, write_tar
from diptych.data.sources.blobs import BlobReader

__all__ = ["SUFFIXES", "ShardParams", "shard"]

SUFFIXES = {
    "jpeg": "jpg",
    "png": "png",
    "webp": "webp",
    "gif": "gif",
    "bmp": "bmp",
    "tiff": "tif",
}
_COLUMNS = (
    "key",
    "messages",
    "kinds",
    "image_names",
    "image_files",
    "image_offsets",
    "image_lengths",
    "image_formats",
    "widths_px",
    "heights_px",
    "image_hashes",
    "text_bytes",
    "content_hash",
)
_RECIPE = b"diptych.recipe_sha256"
_TAR = b"diptych.tar_sha256"
# Less than this is written before processes have started.
_SMALL_SAMPLES = 5_000
_SMALL_BYTES = 512 * 1024**2


@dataclass(frozen=True, slots=True)
class _Task:
    """One shard to write; all that another process needs for it."""

    cut: Cut
    source: RawSource
    sample_index: Path
    root: Path


@dataclass(frozen=True, slots=True)
class _Planned:
    """One sample on its way into a shard: its row, its members' names, its `key.json`."""

    row: dict[str, Any]
    members: tuple[str, ...]
    text: bytes

    @property
    def lengths(self) -> list[int]:
        """Each member's bytes."""
        return [*self.row["image_lengths"], len(self.text)]


def shard(
    sample_index: Path,
    raw_samples: RawSamples,
    quarantine: pa.Table,
    params: ShardParams,
    folder: str,
    executor: ExecutorParams = LOCAL,
) -> tuple[Path, Manifest]:
    """Write every sample of the index into shards.

    Args:
        sample_index: The samples; a shard keeps their order.
        raw_samples: Where each source's images are.
        quarantine: What was refused; the manifest keeps the counts.
        params: Sizes, and how many processes work.
        folder: Where shards go; shards there that are not of this index are removed.
        executor: Where shards are written.

    Returns:
        The folder and the manifest.

    Raises:
        DataError: An image has changed or vanished since it was indexed.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    # A task travels to another process: the parts of its source stay here.
    sources = {
        source.name: source.model_copy(update={"parts": ()}) for source in raw_samples.sources
    }
    cuts = list(cut(sample_index, params=params))
    tasks = [
        _Task(cut=part, source=sources[part.source], sample_index=sample_index, root=root)
        for part in cuts
    ]
    is_small = params.num_processes is None and _is_small(cuts)
    with opened_pool(executor, num_processes=params.num_processes, is_small=is_small) as pool:
        written = list(pool(_keep_or_write, tasks))
    places = {name: place for place, name in enumerate(sources)}
    splits = get_args(Split)
    written.sort(key=lambda part: (splits.index(part.split), places[part.source], part.path))
    _remove_stale(root, shards=written)
    return root, Manifest(shards=tuple(written), quarantined=_count(quarantine))


def _is_small(cuts: list[Cut]) -> bool:
    """Tell whether starting processes would take longer than the work."""
    num_samples = sum(part.num_samples for part in cuts)
    return num_samples <= _SMALL_SAMPLES and sum(part.num_bytes for part in cuts) <= _SMALL_BYTES


def _count(quarantine: pa.Table) -> dict[str, dict[str, int]]:
    """Count refused samples by source, then by reason, both in alphabetical order."""
    found = quarantine.group_by(["source", "reason"]).aggregate([([], "count_all")])
    counts: dict[str, dict[str, int]] = {}
    for row in found.sort_by([("source", "ascending"), ("reason", "ascending")]).to_pylist():
        counts.setdefault(row["source"], {})[row["reason"]] = row["count_all"]
    return counts


def _keep_or_write(task: _Task) -> Shard:
    """Make one shard whole, writing as little as possible."""
    name = f"{task.cut.split}/{task.cut.source}-{task.cut.number:06d}"
    path, index_path = task.root / f"{name}.tar", task.root / f"{name}.parquet"
    rows = read_rows(task.sample_index, chosen=task.cut, columns=_COLUMNS)
    samples = [_plan(row) for row in rows]
    assert len(samples) == task.cut.num_samples, "the sample index changed while it was read"
    recipe = _recipe(samples)
    tar_sha256 = _kept(path, index_path=index_path, recipe=recipe)
    if tar_sha256 is None:
        with replacing(path) as partial:
            write_tar(partial, members=_members(samples, reader=BlobReader(task.source)))
            tar_sha256 = sha256_file(partial)
    index = _index(samples, recipe=recipe, tar_sha256=tar_sha256)
    if not index_path.is_file() or index_path.read_bytes() != index:
        with replacing(index_path) as partial:
            partial.write_bytes(index)
    return Shard(
        path=f"{name}.tar",
        index_path=f"{name}.parquet",
        split=task.cut.split,
        source=task.cut.source,
        num_samples=len(samples),
        num_images=sum(len(sample.row["image_names"]) for sample in samples),
        num_bytes=path.stat().st_size,
        sha256=tar_sha256,
        index_sha256=sha256(index).hexdigest(),
    )


def _plan(row: dict[str, Any]) -> _Planned:
    stem = quote_key(row["key"])
    members = tuple(
        f"{stem}.{place}.{SUFFIXES[format]}" for place, format in enumerate(row["image_formats"])
    )
    described = zip(
        members,
        row["image_names"],
        row["image_formats"],
        row["widths_px"],
        row["heights_px"],
        strict=True,
    )
    document = {
        "key": row["key"],
        "source": row["source"],
        "messages": json.loads(row["messages"]),
        "kinds": row["kinds"],
        "images": [
            {
                "member": member,
                "path": name,
                "format": format,
                "width_px": width,
                "height_px": height,
            }
            for member, name, format, width, height in described
        ],
        "content_hash": row["content_hash"],
    }
    text = canonical_json(document).encode()
    return _Planned(row=row, members=(*members, f"{stem}.json"), text=text)


def _recipe(samples: list[_Planned]) -> str:
    """Hash what makes a shard's bytes: texts, and images by hash and length."""
    digest = sha256(f"{FORMAT_VERSION}\n".encode())
    for sample in samples:
        facts = [sample.row["image_hashes"], sample.row["image_lengths"]]
        digest.update(sample.text + canonical_json(facts).encode() + b"\n")
    return digest.hexdigest()


def _kept(path: Path, *, index_path: Path, recipe: str) -> str | None:
    """Return the hash of a tar that is whole and made of the same samples, else None."""
    if not path.is_file() or not index_path.is_file():
        return None
    try:
        metadata = pq.read_schema(index_path).metadata or {}
    except (pa.ArrowInvalid, OSError):
        return None
    recorded = metadata.get(_TAR, b"").decode()
    if metadata.get(_RECIPE, b"").decode() != recipe or sha256_file(path) != recorded:
        return None
    return recorded


def _members(samples: list[_Planned], *, reader: BlobReader) -> Iterator[tuple[str, bytes]]:
    """Yield every member's name and content; images are read as they are needed."""
    for sample in samples:
        for place, name in enumerate(sample.members[:-1]):
            yield name, _read_image(sample.row, place=place, reader=reader)
        yield sample.members[-1], sample.text


def _read_image(row: dict[str, Any], *, place: int, reader: BlobReader) -> bytes:
    try:
        data = reader.read(
            file=row["image_files"][place],
            offset=row["image_offsets"][place],
            length=row["image_lengths"][place],
            place=place,
        )
    except Refused as error:
        what = f"cannot be read any more ({error.detail})"
        raise _changed(row, place=place, what=what) from error
    if xxh3_bytes(data) != row["image_hashes"][place]:
        raise _changed(row, place=place, what="has changed since it was indexed")
    return data


def _changed(row: dict[str, Any], *, place: int, what: str) -> DataError:
    return DataError(
        f"The image '{row['image_names'][place]}' of sample '{row['key']}' {what}",
        allowed="Images must stay as they are between indexing and sharding",
        cure="Put the image back or run prepare again, which indexes it anew",
    )


def _index(samples: list[_Planned], *, recipe: str, tar_sha256: str) -> bytes:
    """Make a shard's index; compression and layout are fixed, so equal rows give equal bytes."""
    lengths = [sample.lengths for sample in samples]
    offsets = iter(lay_out(length for row in lengths for length in row)[0])
    columns = {
        "key": [sample.row["key"] for sample in samples],
        "member_names": [sample.members for sample in samples],
        "offsets": [[next(offsets) for _ in row] for row in lengths],
        "lengths": lengths,
    }
    for name in ("widths_px", "heights_px", "text_bytes", "content_hash"):
        columns[name] = [sample.row[name] for sample in samples]
    schema = SHARD_INDEX.with_metadata({_RECIPE: recipe, _TAR: tar_sha256})
    buffer = pa.BufferOutputStream()
    pq.write_table(
        pa.table(columns, schema=schema),
        buffer,
        version="2.6",
        compression="zstd",
        compression_level=3,
        use_dictionary=False,
        write_statistics=False,
        row_group_size=len(samples),
    )
    return buffer.getvalue().to_pybytes()


def _remove_stale(root: Path, *, shards: list[Shard]) -> None:
    """Delete shards of an earlier index; anything that is no shard is left alone."""
    current = {name for shard in shards for name in (shard.path, shard.index_path)}
    for split in get_args(Split):
        for pattern in ("*.tar", "*.parquet", ".*.partial"):
            for path in (root / split).glob(pattern):
                if f"{split}/{path.name}" not in current:
                    path.unlink()
        if (root / split).is_dir() and not os.listdir(root / split):
            (root / split).rmdir()
