"""Find the files that a source's paths name: files, folders, globs, brace patterns, URLs.

In: paths as a person wrote them. Out: one root, and the files below it with their sizes and stamps.
Files are listed and asked for their size; only small local ones are read, for their hash.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import braceexpand

from diptych.core.errors import ConfigError, DataError, nearest
from diptych.core.hashing import sha256_file
from diptych.core.records import RawPart
from diptych.data.files.store import FileStat, MissingFile, Store, is_url

_MAX_HASHED_BYTES = 64 << 20
_MAX_HASHED_SOURCE_BYTES = 256 << 20
_GLOB = re.compile(r"[*?\[]")
_MAX_PATTERN_FILES = 1_000_000


@dataclass(frozen=True, slots=True)
class Found:
    """A source's files: parts below one root."""

    root: str
    parts: tuple[RawPart, ...]


def find_parts(paths: Sequence[str], *, suffixes: Sequence[str], source: str) -> Found:
    """Find every file that the paths name, in their order, sorted within each.

    Args:
        paths: Files, folders, globs, brace patterns or URLs.
        suffixes: What a folder's files end in to be taken.
        source: The source's name, for errors.

    Raises:
        DataError: A path names no file, or the paths have no folder in common.
    """
    expanded = [path for pattern in paths for path in _expand(pattern, source=source)]
    remote = {is_url(path) for path in expanded}
    if len(remote) > 1:
        raise ConfigError(
            f"The paths of source '{source}' are partly URLs, partly local",
            cure="Make two sources of them",
        )
    find = _find_remote if remote == {True} else _find_local
    files = {
        path: stat
        for pattern in expanded
        for path, stat in find(pattern, suffixes=suffixes, source=source).items()
    }
    root = _common_root(list(files), source=source)
    total = sum(stat.num_bytes for stat in files.values())
    hashed = remote == {False} and total <= _MAX_HASHED_SOURCE_BYTES
    parts = tuple(
        RawPart(
            path=_below(path, root=root),
            num_bytes=stat.num_bytes,
            stamp=_stamp(path, stat=stat, hashed=hashed),
        )
        for path, stat in files.items()
    )
    return Found(root=root, parts=parts)


def existing_folder(path: str, *, what: str, source: str) -> str:
    """Return a folder's path as it is kept in records; a URL is taken as it is.

    Raises:
        DataError: It is not there, or no folder.
    """
    if is_url(path):
        return path.rstrip("/")
    folder = existing(Path(path), what=what, source=source)
    if not folder.is_dir():
        raise DataError(f"The {what} of source '{source}' is not a folder: '{path}'")
    return folder.as_posix()


def existing(path: Path, *, what: str, source: str) -> Path:
    """Return the path.

    Raises:
        DataError: It is not there; the message names the nearest that is.
    """
    if path.exists():
        return path
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    missing = path.relative_to(parent).parts[0]
    names = sorted(os.listdir(parent)) if parent.is_dir() else []
    raise DataError(
        f"The {what} of source '{source}' is not there: '{path}' (in '{parent}' there is no "
        f"'{missing}')",
        allowed=nearest(missing, allowed=names) if len(names) <= 1000 else "",
        cure="Correct the path; it is relative to the project's folder",
    )


def _expand(pattern: str, *, source: str) -> Iterable[str]:
    """Spell out a brace pattern, unless a file has that very name."""
    if "{" not in pattern or (not is_url(pattern) and os.path.exists(pattern)):
        return [pattern]
    try:
        paths = []
        for path in braceexpand.braceexpand(pattern):
            paths.append(path)
            if len(paths) > _MAX_PATTERN_FILES:
                raise ValueError(f"more than {_MAX_PATTERN_FILES:,} files")
    except ValueError as error:
        raise ConfigError(
            f"The brace pattern '{pattern}' of source '{source}' cannot be spelled out: {error}",
            allowed="Allowed: such as 'shard-{000..099}.tar' or '{train,extra}.tar'",
        ) from error
    return paths


def _find_local(path: str, *, suffixes: Sequence[str], source: str) -> dict[str, FileStat]:
    if os.path.isdir(path):
        found = Store(path).list()
        files = {
            os.path.join(path, name): stat for name, stat in _with_suffix(found, suffixes).items()
        }
    elif _GLOB.search(path) and not os.path.exists(path):
        names = [name for name in sorted(glob.glob(path, recursive=True)) if os.path.isfile(name)]
        files = {name: _stat(name) for name in names}
    else:
        existing(Path(path), what="file", source=source)
        files = {path: _stat(path)}
    return files or _nothing(path, suffixes=suffixes, source=source)


def _find_remote(url: str, *, suffixes: Sequence[str], source: str) -> dict[str, FileStat]:
    url = url.rstrip("/")
    parent, _, name = url.rpartition("/")
    if url.startswith(("http://", "https://")):
        try:
            return {url: Store(parent).stat(name)}
        except MissingFile as error:
            raise DataError(
                f"There is no file '{url}', which source '{source}' names",
                allowed="A web server lists no folders: only files can be named",
                cure="Name them, such as 'https://host/shard-{000..099}.tar'",
            ) from error
    pattern = _GLOB.search(url)
    if pattern is not None:
        folder = url[: pattern.start()].rpartition("/")[0]
        matches = _glob_pattern(url[len(folder) + 1 :])
        found = {name: stat for name, stat in Store(folder).list().items() if matches.match(name)}
    else:
        folder = url
        with suppress(MissingFile):
            if not parent.endswith(":/"):  # else the URL is a whole bucket
                return {url: Store(parent).stat(name)}
        found = _with_suffix(Store(url).list(), suffixes)
    files = {f"{folder}/{name}": stat for name, stat in found.items()}
    return files or _nothing(url, suffixes=suffixes, source=source)


def _with_suffix(found: dict[str, FileStat], suffixes: Sequence[str]) -> dict[str, FileStat]:
    """Keep the files with these suffixes that are not hidden, nor in a hidden folder."""
    return {
        name: stat
        for name, stat in found.items()
        if name.lower().endswith(tuple(suffixes))
        and not any(piece.startswith(".") for piece in PurePosixPath(name).parts)
    }


def _nothing(path: str, *, suffixes: Sequence[str], source: str) -> dict[str, FileStat]:
    raise DataError(
        f"'{path}' of source '{source}' names no file",
        allowed=f"In a folder, files are taken that end in {', '.join(suffixes)}",
        cure="Correct the path; it is relative to the project's folder",
    )


def _glob_pattern(pattern: str) -> re.Pattern[str]:
    """Translate a glob: '*' and '?' stay within a folder, '**/' spans any number of them."""
    pieces = re.split(r"(\*\*/|\*|\?|\[[^\]]+\])", pattern)
    spelled = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    text = "".join(
        spelled.get(piece)
        or (piece.replace("[!", "[^", 1) if re.fullmatch(r"\[.+\]", piece) else re.escape(piece))
        for piece in pieces
    )
    return re.compile(rf"{text}\Z")


def _stat(path: str) -> FileStat:
    return Store(os.path.dirname(path) or ".", links="follow").stat(os.path.basename(path))


def _stamp(path: str, *, stat: FileStat, hashed: bool) -> str:
    if hashed and stat.num_bytes <= _MAX_HASHED_BYTES:
        with suppress(OSError):  # what cannot be read is refused where it is read
            return f"sha256:{sha256_file(Path(path))}"
    return stat.stamp


def _common_root(paths: Sequence[str], *, source: str) -> str:
    """Return the deepest folder that all files lie below."""
    if is_url(paths[0]):
        return _common_url(paths, source=source)
    try:
        root = os.path.commonpath([os.path.dirname(path) or "." for path in paths]) or "."
    except ValueError as error:  # relative and absolute paths
        raise _apart(source) from error
    if any(_below(path, root=root).startswith("../") for path in paths):
        raise _apart(source)
    return Path(root).as_posix()


def _common_url(urls: Sequence[str], *, source: str) -> str:
    scheme = urls[0].partition("://")[0]
    same = all(url.startswith(f"{scheme}://") for url in urls)
    folders = [url.partition("://")[2].rpartition("/")[0] for url in urls]
    root = os.path.commonpath(folders) if same else ""
    if not root:
        raise _apart(source)
    return f"{scheme}://{root}"


def _below(path: str, *, root: str) -> str:
    if is_url(path):
        return path[len(root) + 1 :]
    return Path(os.path.relpath(path, root)).as_posix()


def _apart(source: str) -> ConfigError:
    return ConfigError(
        f"The files of source '{source}' have no folder in common", cure="Make two sources of them"
    )
