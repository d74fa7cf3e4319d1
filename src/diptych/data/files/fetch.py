"""Images by the addresses that rows of data name: one at a time, bounded, from the internet only.

In: an https URL out of somebody's data. Out: its bytes, or `Refused` with the reason; a server that
is gone loses its image and stops nothing. Off unless a source's `image_urls` is 'fetch'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random_exponential,
)

from diptych.data.files.guard import PrivateAddress, open_session
from diptych.data.reasons import Refused

SCHEMES = ("https",)
_MAX_ATTEMPTS = 3
_WAIT = wait_random_exponential(multiplier=0.2, max=5)
_MAX_REDIRECTS = 5
_CHUNK_BYTES = 1 << 16
_TIMEOUT = aiohttp.ClientTimeout(total=60, sock_connect=10, sock_read=20)
_BUSY = (408, 425, 429)


class _Passing(Exception):
    """A fault that may pass."""


def fetch(url: str, *, max_bytes: int, schemes: Sequence[str] = SCHEMES) -> bytes:
    """Fetch an image.

    Args:
        url: As a row names it.
        max_bytes: No more than this is read.
        schemes: Kinds of URL that are dialled.

    Raises:
        Refused: It leads into this network, is too large, or cannot be had.
    """
    if url.partition("://")[0] not in schemes:
        raise Refused(
            "path_escapes", detail=f"Only {', '.join(schemes)} addresses are fetched", value=url
        )
    try:
        return asyncio.run(_fetch(url, max_bytes=max_bytes, schemes=schemes))
    except PrivateAddress as error:
        raise Refused("path_escapes", detail=error.found, value=url) from error
    except (aiohttp.ClientError, OSError, ValueError, _Passing) as error:
        # The text of the fault may hold a signed address that was redirected to.
        detail = f"It cannot be fetched: {type(error).__name__}"
        raise Refused("missing_image", detail=detail, value=url) from error


async def _fetch(url: str, *, max_bytes: int, schemes: Sequence[str]) -> bytes:
    attempts = AsyncRetrying(
        stop=stop_after_attempt(_MAX_ATTEMPTS),
        wait=_WAIT,
        retry=retry_if_exception_type((_Passing, aiohttp.ServerDisconnectedError, TimeoutError)),
        reraise=True,
    )
    # Compressed answers would unpack to any size; nothing is sent that says who asks.
    async with open_session(
        named=None,
        schemes=schemes,
        timeout=_TIMEOUT,
        headers={"Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    ) as session:
        return await attempts(_get, session, url, max_bytes)


async def _get(session: aiohttp.ClientSession, url: str, max_bytes: int) -> bytes:
    async with session.get(url, max_redirects=_MAX_REDIRECTS) as answer:
        if answer.status >= 500 or answer.status in _BUSY:
            raise _Passing(f"status {answer.status}")
        if answer.status != 200:
            raise Refused(
                "missing_image", detail=f"The server answers with {answer.status}", value=url
            )
        data = bytearray()
        async for chunk in answer.content.iter_chunked(_CHUNK_BYTES):
            data += chunk
            if len(data) > max_bytes:
                raise Refused(
                    "too_many_bytes",
                    detail=f"The image has more than {max_bytes:,} bytes",
                    value=url,
                )
        return bytes(data)
