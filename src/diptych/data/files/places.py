"""What local folders and URLs have in common: files' sizes and stamps, and what can go wrong.

In: nothing. Out: the record of a file, and errors that a reader can tell apart.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from diptych.core.errors import DataError

SCHEMES = ("s3", "gs", "https")
"""Kinds of URL that are read; plain http only from this very machine."""

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_COMMAND = re.compile(r"\s*(pipe|exec|ext):", flags=re.IGNORECASE)
"""What other readers of shards hand to a shell."""


class MissingFile(DataError):
    """There is no such file below the root."""


class PathEscapes(DataError):
    """A path that leaves the root."""


class ChangedFile(DataError):
    """A file that ended before the bytes that were asked for, or cannot be read any more."""


@dataclass(frozen=True, slots=True)
class FileStat:
    """A file's size, and a stamp that differs when the file does: 'stat:<time>' or 'etag:<tag>'."""

    num_bytes: int
    stamp: str


def is_url(path: str) -> bool:
    """Tell a URL from a local path."""
    return _URL.match(path) is not None


def check_address(path: str) -> None:
    """Refuse an address that runs a command, holds a secret, or would be read in the clear.

    Raises:
        ValueError: It says what is wrong, and never repeats the address.
    """
    if not path or "\0" in path:
        raise ValueError("a path is empty, or has a character that no path can have")
    if _COMMAND.match(path):
        raise ValueError("a path begins with 'pipe:' or the like: no command is ever run")
    if "::" in path.partition("[")[0]:
        raise ValueError("a path has '::', which chains addresses: name one address alone")
    if "://" in path:
        _check_url(path, scheme=path.partition("://")[0])


def _check_url(url: str, *, scheme: str) -> None:
    try:
        parts = urlsplit(url)
        is_here = parts.hostname in LOCAL_HOSTS
    except ValueError as error:
        raise ValueError(f"not a URL: {error}") from error
    if scheme not in SCHEMES and not (scheme == "http" and is_here):
        allowed = ", ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(f"'{scheme}://' is not read; allowed are {allowed} and local paths")
    is_web = scheme.startswith("http")
    if "@" in parts.netloc or (is_web and (parts.query or parts.fragment)):
        raise ValueError(
            "a URL must hold no user, password, query or fragment: they would be written into "
            "records; give credentials in the environment"
        )


def leaves(path: str) -> bool:
    """Tell whether a path could leave its root by its spelling alone."""
    return not path or path.startswith("/") or "\0" in path or ".." in path.split("/")


def escaping(path: str, *, root: str) -> PathEscapes:
    """Return the error for a path that leaves the root."""
    return PathEscapes(
        f"The path '{path}' leaves '{root}'",
        allowed="Only files below it can be read",
        cure="Move the file there, or name another folder",
    )


@contextmanager
def explained(path: str, *, root: str) -> Iterator[None]:
    """Turn an error of the operating system into one of ours.

    Raises:
        MissingFile: There is no such file.
        ChangedFile: It cannot be read.
    """
    try:
        yield
    except OSError as error:
        gone = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
        if error.errno in gone:
            raise MissingFile(f"There is no '{path}' in '{root}'", cure="Correct it") from error
        raise ChangedFile(
            f"'{path}' in '{root}' cannot be read: {error.strerror}",
            cure="Check that it may be read",
        ) from error
