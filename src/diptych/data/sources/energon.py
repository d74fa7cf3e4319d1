"""Read what `energon prepare` left beside a folder of tars: which shards are in which split.

In: a folder with `.nv-meta`. Out: the tars of each split, and which member holds what. Nothing that
the folder names is imported or run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import braceexpand
import yaml

from diptych.core.errors import DataError
from diptych.data.files.places import leaves
from diptych.data.files.store import MissingFile, Store
from diptych.data.sources.rows import show

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Makes plain values only; the one in C is ten times as fast."""

Split = Literal["train", "heldout"]
_META = ".nv-meta"
_MAX_META_BYTES = 64 << 20
_SPLITS: dict[str, Split] = {
    "train": "train",
    "val": "heldout",
    "test": "heldout",
}
_MEMBERS = {
    "CaptioningSample": {"image": "image", "caption": "caption"},
    "VQASample": {"image": "image", "context": "question", "answers": "answer"},
    "OCRSample": {"image": "image", "text": "caption"},
}
"""What Energon's fields are by our names, for the kinds of sample that hold a conversation."""

_CRUDE = "CrudeSample"
"""Members as they are, without a map of fields: read as any tar is."""


@dataclass(frozen=True, slots=True)
class EnergonMeta:
    """Tars by split (paths below the folder), and our columns to their members."""

    shards: dict[Split, tuple[str, ...]]
    columns: dict[str, str]


def read_energon(folder: str, *, columns: dict[str, str]) -> EnergonMeta:
    """Read an Energon folder's splits and fields.

    Args:
        folder: The folder or URL with `.nv-meta`.
        columns: Which member holds what, where the parameters say it: then `dataset.yaml` is not
            needed.

    Raises:
        DataError: The folder is not prepared, or needs what is not supported.
    """
    store = Store(folder, links="follow")
    splits = _load(store, name="split")
    parts = splits.get("split_parts")
    if not isinstance(parts, dict):
        raise _unusable(folder, why="split.yaml has no 'split_parts'")
    excluded = set(_names(splits.get("exclude") or [], folder=folder))
    single = sorted(name for name in excluded if _is_sample(name))
    if single:
        raise _unusable(
            folder, why=f"split.yaml excludes single samples, such as '{single[0]}', not shards"
        )
    shards = _split_shards(parts, excluded=excluded, folder=folder)
    return EnergonMeta(shards=shards, columns=columns or _read_columns(store, folder=folder))


def _split_shards(
    parts: dict[Any, Any], *, excluded: set[str], folder: str
) -> dict[Split, tuple[str, ...]]:
    shards: dict[Split, tuple[str, ...]] = {}
    for part, patterns in parts.items():
        if part not in _SPLITS:
            raise _unusable(
                folder, why=f"it has a split '{show(part)}', known are {', '.join(_SPLITS)}"
            )
        names = tuple(name for name in _names(patterns, folder=folder) if name not in excluded)
        split = _SPLITS[part]
        shards[split] = tuple(dict.fromkeys(shards.get(split, ()) + names))
    return {split: names for split, names in shards.items() if names}


def _read_columns(store: Store, *, folder: str) -> dict[str, str]:
    dataset = _load(store, name="dataset")
    kind = dataset.get("sample_type")
    name = kind.get("__class__") if isinstance(kind, dict) else dataset.get("__class__")
    name = str(name).replace("Webdataset", "Sample")
    if name == _CRUDE:
        return {}
    fields = dataset.get("field_map")
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields.values()):
        raise _unusable(
            folder, why="dataset.yaml has no 'field_map' (code that it names is not run)"
        )
    members = _MEMBERS.get(name)
    if members is None:
        raise _unusable(
            folder, why=f"its samples are of type '{show(name)}', known are {', '.join(_MEMBERS)}"
        )
    return {members[field]: str(fields[field]) for field in fields if field in members}


def _load(store: Store, *, name: str) -> dict[str, Any]:
    for path in (f"{_META}/{name}.yaml", f"{_META}/{name}.json"):
        try:
            num_bytes = store.stat(path).num_bytes
        except MissingFile:
            continue
        if num_bytes > _MAX_META_BYTES:
            raise _unusable(store.root, why=f"{path} is larger than {_MAX_META_BYTES:,} bytes")
        try:
            found = _Loader(store.read(path)).get_single_data()
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise _unusable(store.root, why=f"{path} is not plain YAML: {error}") from error
        if not isinstance(found, dict):
            raise _unusable(store.root, why=f"{path} holds no fields")
        return found
    raise _unusable(store.root, why=f"there is no {_META}/{name}.yaml")


def _names(patterns: Any, *, folder: str) -> list[str]:
    """Spell out a split's list of brace patterns."""
    if not isinstance(patterns, list) or not all(isinstance(name, str) for name in patterns):
        raise _unusable(
            folder, why=f"split.yaml has no list of shards where it has {show(patterns)}"
        )
    try:
        names = [name for pattern in patterns for name in braceexpand.braceexpand(pattern)]
    except ValueError as error:
        raise _unusable(folder, why=f"split.yaml has a broken pattern: {error}") from error
    for name in names:
        if leaves(name) or "://" in name:
            raise _unusable(folder, why=f"the shard '{show(name)}' lies outside the folder")
    return names


def _is_sample(name: str) -> bool:
    """Tell '<shard>/<sample>' from a shard in a folder."""
    return ".tar/" in name


def _unusable(folder: str, *, why: str) -> DataError:
    return DataError(
        f"'{folder}' cannot be used as an Energon folder: {why}",
        cure="Run `energon prepare` on it, or use kind 'webdataset' and say in 'columns' which "
        "member holds what",
    )
