"""Write shards: tars that webdataset reads, an index beside each, and the manifest over all.

In: `sample_index` and the raw images. Out: `<split>/<source>-000000.tar`, `.parquet` beside it, and
`manifest`. The same samples give the same bytes; a shard whose samples have not changed is kept.
Images are copied as they are: nothing here decodes, and nothing knows of tokens.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from diptych.core.errors import DataError
from diptych.core.files import inside, replacing
from diptych.core.hashing import canonical_json, sha256_file, sha256_json
from diptych.core.records import FORMAT_VERSION, Manifest, RawSamples, Section, Shard
from diptych.core.tables import SHARD_INDEX
from diptych.data.content import content_sha256, sha256_bytes
from diptych.data.tarfmt import TarWriter, quote_stem

SUFFIXES = {
    "jpeg": "jpg",
    "png": "png",
    "webp": "webp",
    "gif": "gif",
    "bmp": "bmp",
    "tiff": "tif",
}
_SPLITS: tuple[Literal["train", "heldout"], ...] = ("train", "heldout")
_RECIPE = b"diptych.recipe_sha256"
_TAR = b"diptych.tar_sha256"


class ShardParams(Section):
    """When a shard is full: whichever comes first."""

    max_samples: int = Field(default=500, ge=1)
    max_bytes: int = Field(default=512 * 1024**2, ge=1)


@dataclass(frozen=True, slots=True)
class _Planned:
    """One sample on its way into a shard: its row, image files, their sizes, its `key.json`."""

    row: dict[str, Any]
    stem: str
    members: tuple[str, ...]
    files: tuple[Path, ...]
    num_bytes: tuple[int, ...]
    text: bytes


def shard(
    sample_index: pa.Table,
    raw_samples: RawSamples,
    quarantine: pa.Table,
    params: ShardParams,
    folder: str,
) -> tuple[Path, Manifest]:
    """Write every sample of the index into shards.

    Args:
        sample_index: The samples; a shard keeps their order.
        raw_samples: Where each source's images are.
        quarantine: What was refused; the manifest keeps the counts.
        params: Sizes.
        folder: Where shards go; shards there that are not of this index are removed.

    Returns:
        The folder and the manifest.

    Raises:
        DataError: An image has changed or vanished since it was indexed.
    """
    root = Path(folder)
    folders = {source.name: Path(source.images) for source in raw_samples.sources}
    rows = [row for batch in sample_index.to_batches() for row in batch.to_pylist()]
    shards: list[Shard] = []
    for split in _SPLITS:
        for source in folders:
            chosen = [row for row in rows if row["split"] == split and row["source"] == source]
            planned = (_plan(row, images=folders[source]) for row in chosen)
            for number, group in enumerate(_cut(planned, params=params)):
                shards.append(
                    _keep_or_write(
                        group, root=root, split=split, source=source, name=f"{source}-{number:06d}"
                    )
                )
    _remove_stale(root, shards=shards)
    root.mkdir(parents=True, exist_ok=True)
    reasons = Counter(quarantine["reason"].to_pylist())
    manifest = Manifest(
        shards=tuple(shards),
        num_quarantined=quarantine.num_rows,
        quarantined_by_reason=dict(sorted(reasons.items())),
    )
    return root, manifest


def _plan(row: dict[str, Any], *, images: Path) -> _Planned:
    stem = quote_stem(row["key"].partition("/")[2])
    members = tuple(
        f"{stem}.{place}.{SUFFIXES[format]}" for place, format in enumerate(row["image_formats"])
    )
    described = zip(
        members,
        row["image_paths"],
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
            {"member": member, "path": path, "format": format, "width_px": width, "height_px": high}
            for member, path, format, width, high in described
        ],
        "content_sha256": row["content_sha256"],
    }
    files = tuple(inside(path, folder=images) for path in row["image_paths"])
    return _Planned(
        row=row,
        stem=stem,
        members=(*members, f"{stem}.json"),
        files=files,
        num_bytes=tuple(_measure(file, key=row["key"]) for file in files),
        text=canonical_json(document).encode(),
    )


def _measure(file: Path, *, key: str) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise _changed(file, key=key, what=f"cannot be read any more ({error.strerror})") from error


def _changed(file: Path, *, key: str, what: str) -> DataError:
    return DataError(
        f"The image '{file}' of sample '{key}' {what}",
        allowed="Images must stay as they are between indexing and sharding",
        cure="Put the image back or run prepare again, which indexes it anew",
    )


def _cut(planned: Iterator[_Planned], *, params: ShardParams) -> Iterator[list[_Planned]]:
    """Part samples into shards in order; a sample larger than a shard has one to itself."""
    group: list[_Planned] = []
    total = 0
    for sample in planned:
        size = sum(sample.num_bytes) + len(sample.text)
        if group and (len(group) == params.max_samples or total + size > params.max_bytes):
            yield group
            group, total = [], 0
        group.append(sample)
        total += size
    if group:
        yield group


def _keep_or_write(
    group: list[_Planned],
    *,
    root: Path,
    split: Literal["train", "heldout"],
    source: str,
    name: str,
) -> Shard:
    path, index_path = f"{split}/{name}.tar", f"{split}/{name}.parquet"
    recipe = sha256_json(
        [FORMAT_VERSION, [[sample.text.decode(), sample.num_bytes] for sample in group]]
    )
    sha256 = _kept(root / path, index_path=root / index_path, recipe=recipe)
    if sha256 is None:
        with replacing(root / path) as partial:
            rows = _write_tar(partial, group=group)
            sha256 = sha256_file(partial)
        _write_index(root / index_path, rows=rows, recipe=recipe, tar_sha256=sha256)
    return Shard(
        path=path,
        index_path=index_path,
        split=split,
        source=source,
        num_samples=len(group),
        num_images=sum(len(sample.files) for sample in group),
        num_bytes=(root / path).stat().st_size,
        sha256=sha256,
        index_sha256=sha256_file(root / index_path),
    )


def _kept(path: Path, *, index_path: Path, recipe: str) -> str | None:
    """Return the hash of a shard that is whole and made of the same samples, else None."""
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


def _write_tar(path: Path, *, group: list[_Planned]) -> list[dict[str, Any]]:
    """Write the samples of one shard and return the rows of its index."""
    rows = []
    with path.open("wb") as file, TarWriter(file) as tar:
        for sample in group:
            contents = [*_read_images(sample), sample.text]
            offsets = [
                tar.add(name, data=data)
                for name, data in zip(sample.members, contents, strict=True)
            ]
            rows.append(
                {
                    "key": sample.row["key"],
                    "member_names": list(sample.members),
                    "offsets": offsets,
                    "lengths": [len(data) for data in contents],
                    "widths_px": sample.row["widths_px"],
                    "heights_px": sample.row["heights_px"],
                    "text_bytes": sample.row["text_bytes"],
                    "content_sha256": sample.row["content_sha256"],
                }
            )
    return rows


def _read_images(sample: _Planned) -> list[bytes]:
    key = sample.row["key"]
    contents = []
    for file, num_bytes in zip(sample.files, sample.num_bytes, strict=True):
        try:
            data = file.read_bytes()
        except OSError as error:
            what = f"cannot be read any more ({error.strerror})"
            raise _changed(file, key=key, what=what) from error
        if len(data) != num_bytes:
            raise _changed(file, key=key, what="changed while it was read")
        contents.append(data)
    found = content_sha256(
        json.loads(sample.row["messages"]),
        image_sha256s=[sha256_bytes(data) for data in contents],
    )
    if found != sample.row["content_sha256"]:
        names = "', '".join(str(file) for file in sample.files)
        raise _changed(Path(names), key=key, what="has changed since it was indexed")
    return contents


def _write_index(path: Path, *, rows: list[dict[str, Any]], recipe: str, tar_sha256: str) -> None:
    """Write a shard's index; compression and layout are fixed, so equal rows give equal bytes."""
    schema = SHARD_INDEX.with_metadata({_RECIPE: recipe, _TAR: tar_sha256})
    with replacing(path) as partial:
        pq.write_table(
            pa.Table.from_pylist(rows, schema=schema),
            partial,
            version="2.6",
            compression="zstd",
            compression_level=3,
            use_dictionary=False,
            write_statistics=False,
            row_group_size=len(rows),
        )


def _remove_stale(root: Path, *, shards: list[Shard]) -> None:
    """Delete shards of an earlier index; anything that is no shard is left alone."""
    current = {name for shard in shards for name in (shard.path, shard.index_path)}
    for split in _SPLITS:
        for pattern in ("*.tar", "*.parquet", ".*.partial"):
            for path in (root / split).glob(pattern):
                if f"{split}/{path.name}" not in current:
                    path.unlink()
        if (root / split).is_dir() and not os.listdir(root / split):
            (root / split).rmdir()
