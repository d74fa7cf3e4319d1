"""Read InternVL's meta file: sets of annotations, each with its images and how often it counts.

In: the meta file `{set: {"root", "annotation", "repeat_time", ...}}`. Out: its sets. Whatever else
a set says (`data_augment`, `length`, ...) is about InternVL's own training and is passed over.
"""

from __future__ import annotations

import json
import math
import os
import posixpath
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.core.errors import DataError
from diptych.data.files.places import check_address
from diptych.data.files.store import Store, is_url
from diptych.data.sources.rows import show

_MAX_META_BYTES = 16 << 20
_UNSAFE = re.compile(r"[^a-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class MetaSet:
    """One set of a meta file; `repeat` is how often an epoch takes each of its samples."""

    name: str
    annotation: str
    images: str
    repeat: float


def read_meta(path: str, *, source: str) -> list[MetaSet]:
    """Read a meta file's sets; those that repeat 0 times are left out.

    Args:
        path: The meta file. Its paths are relative to the project's folder, as InternVL takes them
            from where it is started, or else to the meta file's own folder; those of a remote one
            only to that.
        source: The source's name, with which the sets' names begin.

    Raises:
        DataError: It is no such file, or a set lacks something.
    """
    folder, _, name = path.rpartition("/")
    store = Store(folder or ".", links="follow")
    if store.stat(name).num_bytes > _MAX_META_BYTES:
        raise _no_meta(path, why=f"it is larger than {_MAX_META_BYTES:,} bytes")
    try:
        sets = json.loads(store.read(name).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise _no_meta(path, why=str(error)) from error
    if not isinstance(sets, dict) or not sets:
        raise _no_meta(path, why="it is no JSON object with a set")
    found = [_read_set(name, fields, path=path, source=source) for name, fields in sets.items()]
    names = [one.name for one in found]
    for one in names:
        if names.count(one) > 1:
            raise _no_meta(path, why=f"two sets would both be the source '{one}': rename one")
    return [one for one in found if one.repeat]


def _read_set(name: str, fields: Any, *, path: str, source: str) -> MetaSet:
    if not isinstance(fields, dict):
        raise _no_meta(path, why=f"set '{name}' is no JSON object")
    places = {}
    for key in ("annotation", "root"):
        if not isinstance(fields.get(key), str) or not fields[key]:
            raise _no_meta(path, why=f"set '{name}' has no '{key}' that is a path")
        places[key] = _resolve(fields[key], meta=path)
    repeat = fields.get("repeat_time", 1)
    if isinstance(repeat, bool) or not isinstance(repeat, int | float):
        raise _no_meta(path, why=f"'repeat_time' of set '{name}' is {show(repeat)}, no number")
    if not math.isfinite(repeat) or repeat < 0:
        raise _no_meta(path, why=f"'repeat_time' of set '{name}' is {show(repeat)}")
    return MetaSet(
        name=f"{source}-{_UNSAFE.sub('-', name.lower()).strip('-')}",
        annotation=places["annotation"],
        images=places["root"],
        repeat=float(repeat),
    )


def _resolve(place: str, *, meta: str) -> str:
    folder = meta.rpartition("/")[0]
    try:
        check_address(place)
    except ValueError as error:
        raise _no_meta(meta, why=str(error)) from error
    if is_url(place):
        return place
    if is_url(meta):
        if place.startswith("/") or ".." in place.split("/"):
            raise _no_meta(meta, why=f"'{place}' leaves the folder of the meta file")
        return f"{folder}/{posixpath.normpath(place)}"
    beside = Path(folder or ".") / place
    return beside.as_posix() if not os.path.exists(place) and beside.exists() else place


def _no_meta(path: str, *, why: str) -> DataError:
    return DataError(
        f"'{path}' cannot be used as InternVL's meta file: {why}",
        allowed='Allowed: {"<set>": {"root": "<images>", "annotation": "<file>", '
        '"repeat_time": 1}, ...}',
    )
