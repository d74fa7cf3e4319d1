"""Decode an image's bytes to 8-bit RGB, bounded and upright.

In: a file's bytes. Out: pixels. JPEG goes through simplejpeg where it can; CMYK, palettes, 16-bit
and the other formats go through Pillow. Alpha is laid on white. Knows nothing of processors.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import simplejpeg
from PIL import Image

from diptych.data.images.headers import (
    MAX_AREA_PX,
    ImageHeader,
    check_area,
    opened,
    read_header,
)
from diptych.data.reasons import Refused

__all__ = ["MAX_AREA_PX", "ImageHeader", "check_area", "decode", "read_header"]


def decode(data: bytes, *, max_area_px: int = MAX_AREA_PX) -> np.ndarray:
    """Decode an image, rotated as its EXIF says.

    Args:
        data: The whole file.
        max_area_px: Width times height that the header may promise.

    Returns:
        [H, W, 3] uint8 RGB, contiguous. 16-bit grey is scaled to 8 bits; alpha lies on white.

    Raises:
        Refused: The image is damaged, too large, or of a kind that is not read.
    """
    header = read_header(data)
    check_area(header, max_area_px=min(max_area_px, MAX_AREA_PX))
    pixels = None
    if header.format == "jpeg" and header.mode in ("L", "RGB"):
        pixels = _decode_jpeg(data)
    if pixels is None:
        pixels = _decode_pillow(data)
    pixels = np.ascontiguousarray(_turn(pixels, orientation=header.orientation))
    if pixels.shape != (header.height_px, header.width_px, 3):
        raise Refused(
            "unreadable_image",
            detail="The pixels have another size than the header promised",
            value=f"{pixels.shape[1]}x{pixels.shape[0]}",
        )
    return pixels


def _decode_jpeg(data: bytes) -> np.ndarray | None:
    """Decode with simplejpeg; None where it is stricter than Pillow, which then decides."""
    try:
        return simplejpeg.decode_jpeg(data, colorspace="RGB")
    except ValueError:
        return None


def _decode_pillow(data: bytes) -> np.ndarray:
    with opened(data) as image:
        image.load()
        return _to_rgb(image)


def _to_rgb(image: Image.Image) -> np.ndarray:
    if image.mode.startswith("I;16"):
        # Pillow's own conversion clips at 255 and turns every bright pixel white.
        values = np.asarray(image).astype(np.uint32)
        grey = ((values * 255 + 32767) // 65535).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        over = image.convert("RGBA")
        white = Image.new("RGBA", over.size, (255, 255, 255, 255))
        return np.asarray(Image.alpha_composite(white, over).convert("RGB"))
    return np.asarray(image.convert("RGB"))


def _turn(pixels: np.ndarray, *, orientation: int) -> np.ndarray:
    """Undo the camera's rotation; [H, W, 3] in, the same or [W, H, 3] out."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    # After the transposition, which side to flip follows from the orientation alone.
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return cast(np.ndarray, pixels)
