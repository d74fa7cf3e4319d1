"""Whether the data that a run names is there, whole, and held apart: a manifest in, checks out.

What is read grows with the number of shards, and with the number of samples only where that is
asked for. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from diptych.core.hashing import sha256_file
from diptych.core.records import Check, Manifest, Shard
from diptych.core.tables import read_parts
from diptych.core.units import format_bytes
from diptych.data.files.store import is_url

_HASHED_BYTES = 1 << 30
"""All shards are hashed where they are no larger than this together; else some of them."""
_QUICK_SAMPLES = 200_000
_PREPARE = "Make the shards again: kedro run --pipelines=prepare"


@dataclass(frozen=True)
class Depth:
    """How closely data is looked at.

    Attributes:
        hashes: whether shards are hashed.
        sample_index: the folder with every image's hash, where images are compared, too.
        leakage: what held-out samples may not share with training samples, as `prepare` was told.
    """

    hashes: bool = False
    sample_index: Path | None = None
    leakage: Literal["images", "content"] = "images"


def check_corpus(manifest: Manifest, *, shards: str, depth: Depth) -> Iterator[Check]:
    """Look at the shards' files, and at what the splits share."""
    if is_url(shards):
        yield Check(
            name="shards",
            status="skip",
            found=f"{shards} is remote: each shard is checked as it is read",
        )
    else:
        files = check_files(manifest.shards, folder=Path(shards), hashes=depth.hashes)
        yield files
        if files.status == "fail":
            return
    yield check_splits(manifest, shards=shards, depth=depth)


def check_files(shards: Sequence[Shard], *, folder: Path, hashes: bool) -> Check:
    """Look for every shard and its index; compare sizes, and hashes where that is asked for."""
    wrong = _wrong_files(shards, folder=folder)
    if wrong:
        return Check(name="shards", status="fail", found=wrong, cure=_PREPARE)
    chosen = _to_hash(shards) if hashes else []
    changed = _changed_files(chosen, folder=folder)
    if changed:
        return Check(
            name="shards",
            status="fail",
            found=f"{_some(changed)} changed since the manifest was written",
            cure=_PREPARE,
        )
    hashed = f"; {len(chosen)} of them hashed" if chosen else ""
    total = format_bytes(sum(shard.num_bytes for shard in shards))
    found = f"{len(shards)} shards are there, {total}{hashed}"
    return Check(name="shards", status="pass", found=found)


def _changed_files(shards: Sequence[Shard], *, folder: Path) -> list[str]:
    expected = {shard.path: shard.sha256 for shard in shards}
    expected |= {shard.index_path: shard.index_sha256 for shard in shards}
    return [path for path, sha in expected.items() if sha256_file(folder / path) != sha]


def _wrong_files(shards: Sequence[Shard], *, folder: Path) -> str:
    """Name the files that are not there, or not of the size that the manifest says."""
    sizes = {shard.path: shard.num_bytes for shard in shards}
    missing: list[str] = []
    wrong: list[str] = []
    for path in [*sizes, *(shard.index_path for shard in shards)]:
        try:
            num_bytes = os.stat(folder / path).st_size
        except OSError:
            missing.append(path)
            continue
        if num_bytes != sizes.get(path, num_bytes):
            wrong.append(f"{path} has {num_bytes} bytes instead of {sizes[path]}")
    told = [f"{_some(missing)} not in {folder}"] if missing else []
    return "; ".join([*told, _some(wrong)] if wrong else told)


def check_splits(manifest: Manifest, *, shards: str, depth: Depth) -> Check:
    """Count both splits, and what is in both."""
    train, heldout = manifest.num_samples("train"), manifest.num_samples("heldout")
    counts = f"{train} for training, {heldout} held out"
    if not heldout:
        return Check(
            name="held-out",
            status="warn",
            found=f"{counts}: nothing will tell whether the model generalises",
            cure="Set a source's heldout_fraction, such as 0.02",
        )
    if is_url(shards) or (depth.sample_index is None and train + heldout > _QUICK_SAMPLES):
        found = f"{counts}; what they share is looked at by kedro check, from local files"
        return Check(name="held-out", status="skip", found=found)
    try:
        contents = _shared_contents(manifest, folder=Path(shards))
        images = 0 if depth.sample_index is None else _shared_images(depth.sample_index)
    except (OSError, pa.ArrowException, KeyError) as error:
        found = f"{counts}; what they share cannot be read: {error}"
        return Check(name="held-out", status="fail", found=found, cure=_PREPARE)
    return _judge(counts, contents=contents, images=images, depth=depth)


def _judge(counts: str, *, contents: int, images: int, depth: Depth) -> Check:
    cure = f"{_PREPARE}; prepare.index.leakage decides what the splits may share"
    if contents:
        found = f"{counts}, and {contents} contents are in both"
        return Check(name="held-out", status="fail", found=found, cure=cure)
    if images:
        is_allowed = depth.leakage == "content"
        found = f"{counts}, and {images} images are in both"
        status = "warn" if is_allowed else "fail"
        return Check(name="held-out", status=status, found=found, cure=cure)
    looked = "no content or image" if depth.sample_index is not None else "no content"
    return Check(name="held-out", status="pass", found=f"{counts}; {looked} is in both")


def _shared_contents(manifest: Manifest, *, folder: Path) -> int:
    def of(split: str) -> Iterator[str]:
        for shard in manifest.shards:
            if shard.split == split:
                table = pq.read_table(folder / shard.index_path, columns=["content_hash"])
                yield from table["content_hash"].to_pylist()

    return _num_shared(of)


def _shared_images(sample_index: Path) -> int:
    def of(split: str) -> Iterator[str]:
        for table in read_parts(sample_index, columns=["split", "image_hashes"]):
            splits, hashes = table["split"].to_pylist(), table["image_hashes"].to_pylist()
            for found, each in zip(splits, hashes, strict=True):
                if found == split:
                    yield from each

    return _num_shared(of)


def _num_shared(hashes_of: Callable[[str], Iterator[str]]) -> int:
    """Count what is in both splits; only the smaller one's hashes are held."""
    heldout = set(hashes_of("heldout"))
    return len({each for each in hashes_of("train") if each in heldout})


def _to_hash(shards: Sequence[Shard]) -> list[Shard]:
    """Choose what is hashed: all, or shards spread evenly up to the limit."""
    total = sum(shard.num_bytes for shard in shards)
    if total <= _HASHED_BYTES:
        return list(shards)
    step = -(-total // _HASHED_BYTES)
    return list(shards[::step])


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
