"""Read what an image's header promises: size, format, kind of pixel, orientation. No decoding.

In: a whole file's bytes. Out: an `ImageHeader`, or `Refused` for what is cut off or unknown. JPEG
and PNG are walked by `walk.py`; the other formats go through Pillow's lazy openers.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image, PngImagePlugin, UnidentifiedImageError

from diptych.data.images.walk import (
    PNG_START,
    ImageHeader,
    cut_off,
    gif_is_whole,
    read_jpeg,
    read_orientation,
    read_png,
    rotated,
)
from diptych.data.reasons import Refused

MAX_AREA_PX = 89_478_485
"""The area above which Pillow suspects a decompression bomb; nothing larger is ever decoded."""

PngImagePlugin.MAX_TEXT_MEMORY = 16 << 20
"""What Pillow unpacks of a PNG's texts, all together; a bomb of them takes as much."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_MODES_8 = frozenset(("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"))
_MODES_16 = frozenset(("I;16", "I;16B", "I;16L", "I;16N"))
_MODES = _MODES_8 | _MODES_16
_STRIPS = ((273, 279), (324, 325))
"""TIFF's tags for the offsets and lengths of strips and of tiles."""
_PILLOW_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    SyntaxError,
    LookupError,
    ArithmeticError,
    EOFError,
    MemoryError,
    struct.error,
    Warning,
)


def read_header(data: bytes) -> ImageHeader:
    """Read an image's header.

    Args:
        data: The whole file.

    Returns:
        The size after EXIF rotation, the format in lower case, and Pillow's name of the mode.

    Raises:
        Refused: The file is empty, cut off, of no known format, or of an unknown kind of pixel.
    """
    if not data:
        raise Refused("truncated_image", detail="The image's file is empty", value="0 bytes")
    if data.startswith(b"\xff\xd8"):
        header = read_jpeg(data)
    elif data.startswith(PNG_START):
        header = read_png(data)
    else:
        header = _read_other(data)
    if header.mode not in _MODES:
        raise Refused(
            "unsupported_pixels",
            detail=f"Pixels of mode '{header.mode}' have no defined conversion to 8-bit RGB",
            value=header.mode,
        )
    if not header.width_px or not header.height_px:
        raise Refused(
            "unreadable_image",
            detail="The header promises no pixels",
            value=f"{header.width_px}x{header.height_px}",
        )
    return header


def check_area(header: ImageHeader, *, max_area_px: int) -> None:
    """Refuse an image that promises more pixels than allowed."""
    if header.area_px > max_area_px:
        raise Refused(
            "too_many_pixels",
            detail=f"The header promises {header.area_px:,} pixels, allowed are {max_area_px:,}",
            value=f"{header.width_px}x{header.height_px}",
        )


def _read_other(data: bytes) -> ImageHeader:
    with opened(data) as image:
        # Pillow rotates TIFF by itself, and its size is the rotated one.
        orientation = read_orientation(image.info.get("exif", b"")) if image.format == "WEBP" else 1
        if _ends_early(image, data=data):
            raise cut_off(data, format=image.format or "")
        return rotated(
            image.width,
            image.height,
            format=(image.format or "").lower(),
            mode=image.mode,
            orientation=orientation,
        )


@contextmanager
def opened(data: bytes) -> Iterator[Image.Image]:
    """Open an image with Pillow, restricted to the named formats; nothing is decoded yet.

    Whatever Pillow raises while it is open is refused too, warnings that were made errors included.

    Raises:
        Refused: It is of no known format, damaged, or a decompression bomb by Pillow's measure.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Refused("too_many_pixels", detail=str(error)) from error
    except UnidentifiedImageError as error:
        known = ", ".join(FORMATS)
        raise Refused(
            "unreadable_image", detail=f"The file is none of {known}", value=repr(data[:16])
        ) from error
    except _PILLOW_ERRORS as error:
        raise Refused("unreadable_image", detail=f"Pillow: {error}") from error


def _ends_early(image: Image.Image, *, data: bytes) -> bool:
    """Tell whether a file is shorter than its own header says, where that is cheap to know."""
    if image.format == "WEBP":
        return int.from_bytes(data[4:8], "little") + 8 > len(data)
    if image.format == "BMP":
        return int.from_bytes(data[2:6], "little") > len(data)
    if image.format == "GIF":
        return not gif_is_whole(data)
    tags = getattr(image, "tag_v2", {})
    return any(
        offset + length > len(data)
        for offsets, lengths in _STRIPS
        for offset, length in zip(tags.get(offsets, ()), tags.get(lengths, ()), strict=False)
    )
