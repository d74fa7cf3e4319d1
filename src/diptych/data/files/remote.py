"""Files behind a URL, read through fsspec: listed, measured, and read by ranges.

In: a URL. Out: bytes, sizes and listings of what lies below it. What fails is tried again, a few
times with growing random waits, where the fault may pass: timeouts, overload, broken
connections, answers cut short. A missing file or a refused login fails at once. An error names the
URL and the cure, and never the text of the fault, which may hold signed addresses.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import quote, urlsplit

import fsspec
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from diptych.core.errors import DataError
from diptych.data.files.places import (
    ChangedFile,
    FileStat,
    MissingFile,
    check_address,
    escaping,
    leaves,
)

Result = TypeVar("Result")

_EXTRAS = {"gs": "gcs"}
_MAX_ATTEMPTS = 5
_WAIT = wait_random_exponential(multiplier=0.2, max=10)
_TIMEOUT_S = 60
_READ_AHEAD_BYTES = 4 << 20
_PASSING_ERRNO = {errno.EIO, errno.EBUSY, errno.EAGAIN, getattr(errno, "EREMOTEIO", errno.EIO)}
_PASSING_STATUS = {408, 429}
_NOT_FOUND = 404
_PASSING_NAMES = {"ClientConnectionError", "ClientPayloadError", "HTTPClientError"}
_PASSING_NAMES |= {"EndpointConnectionError", "IncompleteReadError", "ResponseParserError"}
"""Classes of aiohttp and botocore, known by name because both are optional."""


class _ShortRead(OSError):
    """A server that sent fewer bytes than were asked for."""


class Remote:
    """What lies below one URL."""

    def __init__(self, root: str) -> None:
        try:
            check_address(root)
        except ValueError as error:
            raise DataError(f"An address cannot be read: {error}") from error
        self._root = root.rstrip("/")
        scheme = root.partition("://")[0]
        self._quotes = scheme in ("http", "https")
        try:
            self._files, base = fsspec.core.url_to_fs(self._root, **_options(self._root))
        except ImportError as error:
            raise DataError(
                f"'{scheme}://' cannot be read: {error}",
                cure=f"Install it: pip install 'diptych[{_EXTRAS.get(scheme, scheme)}]'",
            ) from error
        if scheme == "s3":
            self._files.retries = 1  # type: ignore[attr-defined]
        self._base = base.rstrip("/")

    def list(self) -> dict[str, FileStat]:
        """Return every file, by its path, in order."""
        found = self._try(lambda: self._files.find(self._base, detail=True), path="")
        return {
            name.removeprefix(self._base).lstrip("/"): _remote_stat(info)
            for name, info in sorted(found.items())
        }

    def stat(self, path: str) -> FileStat:
        """Return a file's size and stamp; raises as `Store.stat`."""
        info = self._try(lambda: self._info(self._full(path)), path=path)
        if info.get("type") == "directory":
            raise MissingFile(f"'{self._root}/{path}' is a folder, not a file")
        if info.get("size") is None:
            raise ChangedFile(
                f"'{self._root}/{path}' is no file of a known size",
                allowed="Only files whose size the server tells can be read",
            )
        return _remote_stat(info)

    def read_range(self, path: str, *, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes from `offset` on; raises as `Store.read_range`."""
        full = self._full(path)

        def read() -> bytes:
            data = self._files.cat_file(full, start=offset, end=offset + length)
            if len(data) < length:
                raise _ShortRead(f"{len(data):,} of {length:,} bytes came")
            return data

        data = self._try(read, path=path) if length else b""
        if len(data) > length:
            raise DataError(
                f"The server of '{self._root}' sends whole files where a range is asked for",
                cure="Use a server that knows HTTP ranges, or copy the files to a local folder",
            )
        return data

    def open(self, path: str, *, num_bytes: int) -> BinaryIO:
        """Open a file of this many bytes for reading and seeking; it is read ahead."""
        stream = RemoteFile(self, path=path, num_bytes=num_bytes)
        return cast(BinaryIO, io.BufferedReader(stream, buffer_size=_READ_AHEAD_BYTES))

    def _info(self, full: str) -> dict[str, Any]:
        try:
            return self._files.info(full)
        except FileNotFoundError as error:
            # fsspec's HTTP says so of every fault; the cause is the answer, if there was one.
            cause = error.__cause__
            if self._quotes and isinstance(cause, Exception) and _status(cause) != _NOT_FOUND:
                raise cause from None
            raise

    def _full(self, path: str) -> str:
        if leaves(path):
            raise escaping(path, root=self._root)
        return f"{self._base}/{quote(path) if self._quotes else path}"

    def _try(self, function: Callable[[], Result], *, path: str) -> Result:
        attempts = Retrying(
            stop=stop_after_attempt(_MAX_ATTEMPTS),
            wait=_WAIT,
            retry=retry_if_exception(_may_pass),
            reraise=True,
        )
        url = f"{self._root}/{path}" if path else self._root
        try:
            return attempts(function)
        except DataError:
            raise
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise MissingFile(f"There is no '{url}'", cure="Correct the path") from error
        except _ShortRead as error:
            raise ChangedFile(
                f"'{url}' was cut off {_MAX_ATTEMPTS} times: {error}",
                cure="Was it changed? Run again when it is complete",
            ) from error
        except Exception as error:
            raise _refused(url, error=error) from error


class RemoteFile(io.RawIOBase):
    """A remote file as a stream; every read is a range that is tried again by itself."""

    def __init__(self, remote: Remote, *, path: str, num_bytes: int) -> None:
        super().__init__()
        self._remote = remote
        self._path = path
        self._num_bytes = num_bytes
        self._at = 0

    def readable(self) -> bool:
        """Tell that this can be read."""
        return True

    def seekable(self) -> bool:
        """Tell that this can be searched."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a byte."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._num_bytes}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        """Return the byte that is read next."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, or what the file's end leaves of it."""
        length = min(len(buffer), max(0, self._num_bytes - self._at))
        data = self._remote.read_range(self._path, offset=self._at, length=length)
        buffer[:length] = data
        self._at += length
        return length


def _options(root: str) -> dict[str, Any]:
    """Have fsspec keep no listings, wait a bounded time, and leave the retrying to this module."""
    scheme = root.partition("://")[0]
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme == "s3":
        timeouts = {"connect_timeout": _TIMEOUT_S, "read_timeout": _TIMEOUT_S}
        options["config_kwargs"] = timeouts | {"retries": {"max_attempts": 0}}
    elif scheme in ("http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT_S, sock_read=_TIMEOUT_S)
        options["client_kwargs"] = {"timeout": timeout}
        options["get_client"] = _client_for(urlsplit(root).hostname or "", scheme)
    return options


@lru_cache(maxsize=64)
def _client_for(host: str, scheme: str) -> Callable[..., Any]:
    """Return what opens sessions to a host that a person named; fsspec keeps one for each."""
    from diptych.data.files.guard import open_session

    async def open_client(**options: Any) -> Any:
        return open_session(named=host, schemes=(scheme, "https"), **options)

    return open_client


def _may_pass(error: BaseException) -> bool:
    """Tell whether trying again may help: timeouts, overload, broken connections."""
    status = _status(error)
    if status is not None:
        return status >= 500 or status in _PASSING_STATUS
    if isinstance(error, TimeoutError | ConnectionError | _ShortRead):
        return True
    if any(kind.__name__ in _PASSING_NAMES for kind in type(error).__mro__):
        return True
    return isinstance(error, OSError) and error.errno in _PASSING_ERRNO


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error carries (aiohttp's `status`, gcsfs' `code`)."""
    name = "status" if hasattr(error, "status") else "code"
    found = getattr(error, name, None)
    return int(found) if isinstance(found, int | str) and str(found).isdigit() else None


def _refused(url: str, *, error: Exception) -> DataError:
    """Explain an error without its text, which may hold signed addresses."""
    status = _status(error)
    if isinstance(error, PermissionError) or status in (401, 403):
        return DataError(
            f"The server refuses to let '{url}' be read",
            cure="Give credentials in the environment (such as AWS_ACCESS_KEY_ID), or check that "
            "they may read it",
        )
    if "Credentials" in type(error).__name__:
        return DataError(
            f"There are no credentials for '{url}'",
            cure="Give them in the environment (such as AWS_ACCESS_KEY_ID)",
        )
    found = f"{type(error).__name__}{'' if status is None else f' {status}'}"
    tried = f" after {_MAX_ATTEMPTS} attempts" if _may_pass(error) else ""
    return DataError(
        f"'{url}' cannot be read{tried}: {found}", cure="Check the address and the network"
    )


def _remote_stat(info: dict[str, Any]) -> FileStat:
    tag = info.get("ETag") or info.get("etag")
    time = info.get("LastModified") or info.get("Last-Modified") or info.get("updated") or ""
    num_bytes = int(info["size"])
    stamp = f"etag:{str(tag).strip(chr(34))}" if tag else f"stat:{num_bytes}/{time}"
    return FileStat(num_bytes=num_bytes, stamp=stamp)
