"""In: an image's bytes. Out: what a browser shows of them, small, or nothing.

Every image is decoded as training decodes it, within the same bounds, before any of its bytes reach
a page.
"""

from __future__ import annotations

import base64
import io

from diptych.data.images.decode import decode, read_header
from diptych.data.reasons import Refused

MAX_IMAGE_BYTES = 100_000
"""Larger images are made smaller, so that the page stays small."""
MAX_SIDE_PX = 480
MAX_AREA_PX = 64_000_000
THUMBNAIL_BYTES = 8_000
THUMBNAIL_SIDE_PX = 160

_WEB_FORMATS = ("jpeg", "png", "webp", "gif")


def for_page(
    data: bytes, *, max_bytes: int = MAX_IMAGE_BYTES, max_side_px: int = MAX_SIDE_PX
) -> tuple[str, bytes]:
    """Return an image's media type and bytes as a browser shows them, made smaller where needed.

    An image that cannot be decoded gives an empty type and no bytes.

    Args:
        data: the whole file.
        max_bytes: up to here a browser gets the file as it is.
        max_side_px: the longer side of an image that is made smaller.
    """
    from PIL import Image

    try:
        pixels = decode(data, max_area_px=MAX_AREA_PX)
        kind = read_header(data).format
    except Refused:
        return "", b""
    if kind in _WEB_FORMATS and len(data) <= max_bytes:
        return f"image/{kind}", data
    small = Image.fromarray(pixels)
    small.thumbnail((max_side_px, max_side_px))
    out = io.BytesIO()
    small.save(out, format="JPEG", quality=85)
    return "image/jpeg", out.getvalue()


def thumbnail(data: bytes) -> str | None:
    """Return a small picture as a data URI; None for an image that cannot be decoded."""
    media_type, small = for_page(data, max_bytes=THUMBNAIL_BYTES, max_side_px=THUMBNAIL_SIDE_PX)
    return data_uri(media_type, data=small) if media_type else None


def data_uri(media_type: str, *, data: bytes) -> str:
    """Write bytes as a URI that needs no file."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
