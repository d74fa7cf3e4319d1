"""Images that promise far more than they hold, and the memory that reading them takes.

`python -m tests.security.bombs` reads every bomb with a careless reader and with ours, and prints
by how many bytes each let the process grow, as one line of JSON.
"""

from __future__ import annotations

import io
import json
import struct
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from PIL import Image, ImageFile

from diptych.data.images.decode import decode
from diptych.data.reasons import Refused
from tests.security.fuzz import formats

SIDE_PX = 65_535
CARELESS_SIDE_PX = 4_000
"""What the careless reader is given: of 65,535 squared it would never come back."""


def promise(name: str, *, side_px: int) -> bytes:
    """Let a small image of some format claim side x side pixels."""
    data = bytearray(formats()[name])
    if name.startswith("jpeg"):
        start = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
        data[start + 5 : start + 9] = struct.pack(">HH", side_px, side_px)
    elif name.startswith("png"):
        data[16:24] = struct.pack(">II", side_px, side_px)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    elif name == "gif-animated":
        at = data.index(b"\x2c", 13 + 3 * 8)  # the first frame may be larger than the screen
        data[at + 5 : at + 9] = struct.pack("<HH", side_px, side_px)
    elif name.startswith("gif"):
        data[6:10] = struct.pack("<HH", side_px, side_px)
    elif name.startswith("bmp"):
        data[18:26] = struct.pack("<ii", side_px, side_px)
    elif name == "webp-animated":
        at = data.index(b"VP8X") + 12
        data[at : at + 6] = struct.pack("<I", side_px - 1)[:3] * 2
    else:
        data = _with_tags(data, {256: side_px, 257: side_px})
    return bytes(data)


PROMISING = (
    "jpeg",
    "jpeg-progressive",
    "jpeg-grey",
    "jpeg-cmyk",
    "png",
    "png-palette",
    "png-16",
    "webp-animated",
    "gif",
    "gif-animated",
    "bmp",
    "bmp-palette",
    "tiff",
)


COMPRESSED = ("png pixels", "png zTXt", "png iTXt", "png iCCP", "png many zTXt", "png many iTXt")


def compressed_bombs() -> dict[str, bytes]:
    """Make PNGs whose chunks unpack to 80 megabytes and more."""
    deflated = zlib.compress(bytes(80 << 20), 9)
    # Just under what Pillow takes of one chunk, as often as it takes them.
    allowed = zlib.compress(bytes((1 << 20) - 64), 9)
    return {
        "png pixels": _png(pixels=deflated),
        "png zTXt": _png((b"zTXt", b"k\0\0" + deflated)),
        "png iTXt": _png((b"iTXt", b"k\0\1\0\0\0" + deflated)),
        "png iCCP": _png((b"iCCP", b"k\0\0" + deflated)),
        "png many zTXt": _png(*[(b"zTXt", b"k%d\0\0" % n + allowed) for n in range(100)]),
        "png many iTXt": _png(*[(b"iTXt", b"k%d\0\1\0\0\0" % n + allowed) for n in range(100)]),
    }


def _png(*chunks: tuple[bytes, bytes], pixels: bytes | None = None) -> bytes:
    head = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    parts = [
        (b"IHDR", head),
        *chunks,
        (b"IDAT", pixels or zlib.compress(bytes(25 * 8))),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in parts
    )


def _with_tags(data: bytearray, values: dict[int, int]) -> bytearray:
    """Set tags of a little-endian TIFF."""
    (start,) = struct.unpack_from("<I", data, 4)
    (num_tags,) = struct.unpack_from("<H", data, start)
    for place in range(start + 2, start + 2 + 12 * num_tags, 12):
        (tag,) = struct.unpack_from("<H", data, place)
        if tag in values:
            struct.pack_into("<HII", data, place + 2, 4, 1, values[tag])
    return data


def grown_by(act: Callable[[], Any]) -> int:
    """Return by how many bytes the process grew at its largest while it did something."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is counted from here
    before = _status("VmRSS")
    act()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


def read_carelessly(data: bytes) -> None:
    """Decode with Pillow, with its own limits off, up to where the file ends."""
    with suppress(OSError), Image.open(io.BytesIO(data)) as image:
        image.load()
        image.convert("RGB").tobytes()


def inflate(data: bytes) -> None:
    """Unpack whatever is compressed, as a reader without limits does."""
    at, kept = 8, []
    while at < len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        body = data[at + 8 : at + 8 + length]
        at += 12 + length
        start = {b"IDAT": 0, b"zTXt": body.find(b"\0") + 2, b"iCCP": body.find(b"\0") + 2}
        start[b"iTXt"] = body.find(b"\0") + 5
        if kind in start:
            kept.append(zlib.decompress(body[start[kind] :]))


def read(data: bytes) -> str:
    """Read with our decoder; return how that ended."""
    try:
        decode(data)
    except Refused as error:
        return error.reason
    return "pixels"


def main() -> None:
    """Print the growth of every bomb, by careless reading and by ours, and how ours ended."""
    found: dict[str, dict[str, Any]] = {}
    for name in PROMISING:
        bomb = promise(name, side_px=SIDE_PX)
        found[name] = {"ours": grown_by(lambda bomb=bomb, name=name: found_ends(name, bomb))}
    for name, bomb in compressed_bombs().items():
        found[name] = {"ours": grown_by(lambda bomb=bomb, name=name: found_ends(name, bomb))}
        found[name]["careless"] = grown_by(lambda bomb=bomb: inflate(bomb))
    Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = None, True
    warnings.simplefilter("ignore")
    for name in PROMISING:
        bomb = promise(name, side_px=CARELESS_SIDE_PX)
        found[name]["careless"] = grown_by(lambda bomb=bomb: read_carelessly(bomb))
    print(json.dumps({name: {**each, "end": ENDS[name]} for name, each in found.items()}))


ENDS: dict[str, str] = {}


def found_ends(name: str, bomb: bytes) -> None:
    """Note how reading a bomb ended."""
    ENDS[name] = read(bomb)


if __name__ == "__main__":
    main()
