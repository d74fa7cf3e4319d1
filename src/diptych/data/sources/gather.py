"""Find every source's files, and digest enough of them to notice a change.

In: the parameters' sources. Out: `raw_samples`. Runs at every start, so that nothing large is read;
the starter data are built here where they are missing.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from diptych.core.errors import ConfigError, DataError
from diptych.core.records import RawPart, RawSamples, RawSource
from diptych.data.files.places import explained
from diptych.data.files.store import Store, is_url
from diptych.data.sources import starter
from diptych.data.sources.energon import read_energon
from diptych.data.sources.files import existing, existing_folder, find_parts
from diptych.data.sources.internvl import read_meta
from diptych.data.sources.llava import LINE_SUFFIXES, is_array
from diptych.data.sources.params import Kind, SourceParams
from diptych.data.sources.row import MAX_ROW_BYTES

_SAFE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_HEAD_BYTES = 4096
_SUFFIXES = {
    "llava": (".json", *LINE_SUFFIXES),
    "parquet": (".parquet",),
    "csv": (".csv", ".tsv"),
    "webdataset": (".tar", ".tgz", ".tar.gz"),
}


def gather(sources: dict[str, SourceParams]) -> RawSamples:
    """Find every source's files and digest them; build the starter data where they are missing.

    Args:
        sources: By name, which is the first part of each sample's key.

    Returns:
        One entry per named set; several for the starter data, an InternVL meta file and an Energon
        folder.

    Raises:
        ConfigError: There is no source, or a name is unsafe in file names.
        DataError: A path is not there; the message names the nearest that is.
    """
    if not sources:
        raise ConfigError(
            "No source of samples is given",
            cure="Name at least one under 'sources' in the parameters of prepare",
        )
    found: list[RawSource] = []
    for name, params in sources.items():
        _check_name(name)
        found += _GATHERERS[params.kind](name, params)
    for source in found:
        _check_name(source.name)
    return RawSamples(sources=tuple(_with_listing(found)))


def _check_name(name: str) -> None:
    if not _SAFE_NAME.fullmatch(name):
        raise ConfigError(
            f"A source cannot be named '{name}'",
            allowed="Allowed: lower-case letters, digits, '-' and '_', at most 64",
        )


def _starter(name: str, params: SourceParams) -> list[RawSource]:
    folder = Path(params.paths[0])
    if not starter.is_starter(folder):
        others = [path for path in folder.glob("*") if path.name not in ("images", ".gitkeep")]
        if others:
            raise DataError(
                f"'{folder}' holds no starter data but other files, such as '{others[0].name}'",
                allowed="The starter data are built in an empty or a new folder",
                cure="Name another folder, or use kind 'llava' for your own samples",
            )
        starter.build_starter(folder)
    splits: tuple[Literal["train", "heldout"], ...] = ("train", "heldout")
    return [
        _source(
            name,
            params.model_copy(update={"split": split, "images": folder.as_posix()}),
            kind="llava",
            paths=(f"{folder.as_posix()}/{split}.json",),
        )
        for split in splits
    ]


def _files(name: str, params: SourceParams) -> list[RawSource]:
    kind = params.kind
    assert kind in ("llava", "parquet", "csv", "webdataset"), f"{kind} is gathered in its own way"
    return [_source(name, params, kind=kind, paths=params.paths)]


def _internvl(name: str, params: SourceParams) -> list[RawSource]:
    meta = params.paths[0]
    if not is_url(meta):
        existing(Path(meta), what="meta file", source=name)
    return [
        _source(
            one.name,
            params.model_copy(update={"images": one.images, "repeat": params.repeat * one.repeat}),
            kind="llava",
            paths=(one.annotation,),
        )
        for one in read_meta(meta, source=name)
    ]


def _energon(name: str, params: SourceParams) -> list[RawSource]:
    folder = existing_folder(params.paths[0], what="Energon folder", source=name)
    meta = read_energon(folder, columns=params.columns)
    if not meta.shards:
        raise DataError(f"The Energon folder '{folder}' of source '{name}' has no shard")
    single = len(meta.shards) == 1 and "train" in meta.shards
    return [
        _source(
            name,
            params.model_copy(
                update={
                    "columns": meta.columns,
                    # A folder without a held-out part may still hold some of its samples out.
                    "split": None if single and params.heldout_fraction else split,
                    "heldout_fraction": params.heldout_fraction if single else 0.0,
                }
            ),
            kind="webdataset",
            paths=tuple(f"{folder}/{shard}" for shard in shards),
        )
        for split, shards in meta.shards.items()
    ]


_GATHERERS: dict[Kind, Callable[[str, SourceParams], list[RawSource]]] = {
    "starter": _starter,
    "llava": _files,
    "internvl": _internvl,
    "parquet": _files,
    "csv": _files,
    "webdataset": _files,
    "energon": _energon,
}


def _source(
    name: str,
    params: SourceParams,
    *,
    kind: Literal["llava", "parquet", "csv", "webdataset"],
    paths: tuple[str, ...],
) -> RawSource:
    found = find_parts(paths, suffixes=_SUFFIXES[kind], source=name)
    images = params.images or found.root
    parts = found.parts
    if kind == "llava":
        store = Store(found.root, links="follow")
        parts = tuple(piece for part in parts for piece in _cut(part, store=store))
    return RawSource(
        name=name,
        kind=kind,
        split=params.split,
        heldout_fraction=params.heldout_fraction,
        repeat=params.repeat,
        root=found.root,
        images=existing_folder(images, what="image folder", source=name),
        image_urls=params.image_urls,
        parts=parts,
        columns=params.columns,
        prompt=params.prompt,
    )


def _cut(part: RawPart, *, store: Store) -> list[RawPart]:
    """Cut a long file of lines into ranges of bytes; an array stays whole."""
    if part.num_bytes <= MAX_ROW_BYTES:
        return [part]
    num_bytes = min(part.num_bytes, _HEAD_BYTES)
    if is_array(part.path, head=store.read_range(part.path, offset=0, length=num_bytes)):
        return [part]
    return [
        part.model_copy(update={"start": start, "end": min(start + MAX_ROW_BYTES, part.num_bytes)})
        for start in range(0, part.num_bytes, MAX_ROW_BYTES)
    ]


def _with_listing(sources: list[RawSource]) -> list[RawSource]:
    """Add what tells a changed folder of images; remote ones are not listed."""
    listings: dict[str, tuple[str, int]] = {}
    found = []
    for source in sources:
        if source.kind == "webdataset" or is_url(source.images):
            found.append(source)
            continue
        if source.images not in listings:
            listings[source.images] = _list_files(Path(source.images))
        sha256, count = listings[source.images]
        found.append(source.model_copy(update={"listing_sha256": sha256, "num_image_files": count}))
    return found


def _list_files(folder: Path) -> tuple[str, int]:
    """Hash (relative path, size, time) of every file below a folder; cheap, nothing is read."""
    entries: list[tuple[str, int, int]] = []
    pending = [""]
    while pending:
        below = pending.pop()
        with explained(below or ".", root=str(folder)), os.scandir(folder / below) as listing:
            for entry in listing:
                path = f"{below}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    pending.append(f"{path}/")
                    continue
                with suppress(FileNotFoundError):  # it vanished just now
                    status = entry.stat(follow_symlinks=False)
                    entries.append((path, status.st_size, status.st_mtime_ns))
    digest = hashlib.sha256()
    for entry in sorted(entries):
        digest.update(repr(entry).encode())
    return digest.hexdigest(), len(entries)
