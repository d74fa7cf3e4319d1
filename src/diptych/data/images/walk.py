"""Walk the bytes of JPEG, PNG and GIF files and of EXIF, piece by piece, without Pillow.

In: a whole file's bytes. Out: an `ImageHeader`, or `Refused` for what is cut off. Pillow's openers
do not see a missing end, and its PNG one decodes everything to find the orientation.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from diptych.data.reasons import Refused

PNG_START = b"\x89PNG\r\n\x1a\n"
_ORIENTATION_TAG = 0x0112
_PNG_MODES = {0: "L", 2: "RGB", 3: "P", 4: "LA", 6: "RGBA"}
_JPEG_MODES = {1: "L", 3: "RGB", 4: "CMYK"}
_JPEG_FRAMES = frozenset(range(0xFFC0, 0xFFD0)) - {0xFFC4, 0xFFC8, 0xFFCC}
_JPEG_READ_FRAMES = frozenset({0xFFC0, 0xFFC1, 0xFFC2, 0xFFC9, 0xFFCA})
"""Baseline, extended and progressive; lossless and hierarchical ones have no decoder here."""
_FRAME = struct.Struct(">BHHB")
_JPEG_BARE = frozenset({0xFF01, *range(0xFFD0, 0xFFD9), 0xFFFF})
"""Markers without a segment; 0xffff only fills."""
_JPEG_END = 0xFFD9
_JPEG_PLAIN = frozenset(range(0xFF00, 0x10000)) - _JPEG_BARE - {_JPEG_END}
"""Markers that a length follows."""
_JPEG_TOLD = _JPEG_FRAMES | {0xFFE1, 0xFFDA}
"""Those of segments that say something: frames, EXIF, and the first scan."""
_SEGMENT = struct.Struct(">HH")


class ImageHeader(NamedTuple):
    """Facts of one image; width and height are those after the EXIF rotation `orientation`, 1-8."""

    width_px: int
    height_px: int
    format: str
    mode: str
    orientation: int = 1

    @property
    def area_px(self) -> int:
        """Width times height."""
        return self.width_px * self.height_px


def read_jpeg(data: bytes) -> ImageHeader:
    """Read a JPEG: walk its segments up to the first scan, then look for the end behind it."""
    position, orientation, frame, num_bytes = 2, 1, None, len(data)
    unpack_from = _SEGMENT.unpack_from
    while True:
        try:
            marker, length = unpack_from(data, position)
        except struct.error:
            marker, length = 0, 0
        if marker not in _JPEG_PLAIN:
            position, marker, length = _next_segment(data, position=position)
        start = position + 4
        position += 2 + length
        if length < 2 or position > num_bytes:
            raise cut_off(data, format="JPEG")
        if marker not in _JPEG_TOLD:
            continue
        if marker == 0xFFDA:
            break
        if marker != 0xFFE1:
            frame = frame or _read_frame(marker, segment=data[start:position])
        elif orientation == 1 and data.startswith(b"Exif\0\0", start, position):
            orientation = read_orientation(data[start:position])
    if frame is None:
        raise Refused("unreadable_image", detail="The JPEG has no frame header", value="no SOF")
    # Inside a scan every 0xff is followed by a zero or a restart: this can only be the end. It
    # mostly is where it belongs, and looking through a whole file takes as long as all the rest.
    if not data.endswith(b"\xff\xd9") and data.find(b"\xff\xd9", position) < 0:
        raise cut_off(data, format="JPEG")
    width_px, height_px, mode = frame
    return rotated(width_px, height_px, format="jpeg", mode=mode, orientation=orientation)


def _read_frame(marker: int, *, segment: bytes) -> tuple[int, int, str]:
    """Return the stored width and height, and the mode."""
    if marker not in _JPEG_READ_FRAMES or len(segment) < 6:
        return 1, 1, f"JPEG process {marker - 0xFFC0}"
    precision, height_px, width_px, num_components = _FRAME.unpack_from(segment)
    mode = _JPEG_MODES.get(num_components, f"{num_components} components")
    return width_px, height_px, mode if precision == 8 else f"{mode};{precision}"


def _unpack_segment(data: bytes, position: int) -> tuple[int, int]:
    try:
        return _SEGMENT.unpack_from(data, position)
    except struct.error as error:
        if position + 2 > len(data):
            raise cut_off(data, format="JPEG") from error
        return int.from_bytes(data[position : position + 2], "big"), 0


def _next_segment(data: bytes, *, position: int) -> tuple[int, int, int]:
    """Return the place of the next marker that has a segment, the marker, the segment's length."""
    marker, length = _unpack_segment(data, position)
    while marker in _JPEG_BARE:
        position += 1 if marker == 0xFFFF else 2
        marker, length = _unpack_segment(data, position)
    if marker < 0xFF00:
        raise Refused(
            "unreadable_image", detail="The JPEG's segments are damaged", value=f"at {position}"
        )
    if marker == _JPEG_END:
        raise Refused("unreadable_image", detail="The JPEG has no scan", value=f"at {position}")
    return position, marker, length


def read_png(data: bytes) -> ImageHeader:
    """Read a PNG: walk its chunks; the orientation may stand before or after the pixels."""
    position, orientation = len(PNG_START), 1
    width_px = height_px = 0
    mode = ""
    while True:
        if position + 12 > len(data):
            raise cut_off(data, format="PNG")
        length, kind = struct.unpack(">I4s", data[position : position + 8])
        content = position + 8
        position = content + length + 4
        if position > len(data):
            raise cut_off(data, format="PNG")
        if kind == b"IHDR" and length >= 13:
            width_px, height_px, depth, colour = struct.unpack(
                ">IIBB", data[content : content + 10]
            )
            mode = _PNG_MODES.get(colour, f"PNG colour type {colour}")
            mode = "I;16" if mode == "L" and depth == 16 else mode
        elif kind == b"eXIf":
            orientation = read_orientation(b"Exif\0\0" + data[content : content + length])
        elif kind == b"IEND":
            return rotated(width_px, height_px, format="png", mode=mode, orientation=orientation)


def gif_is_whole(data: bytes) -> bool:
    """Tell whether a GIF's blocks lead to its trailer."""
    position = 13 + _colour_table_bytes(data[10:11])
    while data[position : position + 1] in (b",", b"!"):
        if data[position : position + 1] == b"!":
            position += 2
        else:
            position += 11 + _colour_table_bytes(data[position + 9 : position + 10])
        while length := int.from_bytes(data[position : position + 1], "big"):
            position += 1 + length
        position += 1
    return data[position : position + 1] == b";"


def _colour_table_bytes(flags: bytes) -> int:
    packed = int.from_bytes(flags, "big")
    return 3 << (packed % 8 + 1) if packed & 0x80 else 0


def read_orientation(exif: bytes) -> int:
    """Return the EXIF orientation, 1 to 8; damaged or absent EXIF means 1.

    Differs: Pillow's parser reads every tag, warns of each damaged one, and looks into XMP too.
    """
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None or len(tiff) < 8:
        return 1
    (start,) = struct.unpack(f"{order}I", tiff[4:8])
    num_entries = int.from_bytes(tiff[start : start + 2], "little" if order == "<" else "big")
    for place in range(start + 2, start + 2 + 12 * num_entries, 12):
        entry = tiff[place : place + 12]
        if len(entry) < 12:
            return 1
        tag, _, _, value = struct.unpack(f"{order}HHIH", entry[:10])
        if tag == _ORIENTATION_TAG:
            return value if 1 <= value <= 8 else 1
    return 1


def rotated(
    width_px: int, height_px: int, *, format: str, mode: str, orientation: int
) -> ImageHeader:
    """Make a header of the size as stored: orientations from 5 on exchange width and height."""
    if orientation >= 5:
        width_px, height_px = height_px, width_px
    return ImageHeader(width_px, height_px, format, mode, orientation)


def cut_off(data: bytes, *, format: str) -> Refused:
    """Make the refusal of a file that is too short."""
    return Refused(
        "truncated_image",
        detail=f"The {format} file ends before its image does",
        value=f"{len(data)} bytes",
    )
