"""Images that are damaged at random, and what reading them did.

`python -m tests.security.fuzz --seconds 600` runs for a while and prints what it saw; the fast
suite runs a few with fixed seeds. An input is found again by its format and number alone.
"""

from __future__ import annotations

import argparse
import io
import json
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from diptych.data.images.decode import decode
from diptych.data.reasons import Refused

MAX_AREA_PX = 1_000_000
INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


@dataclass
class Outcome:
    """What was seen: how inputs ended, which raised what they must not, and the slowest."""

    num_inputs: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest: str = ""


def formats() -> dict[str, bytes]:
    """Make a small image of every format that is accepted, by every way to write it."""
    colours = np.random.default_rng(0).integers(0, 256, size=(24, 31, 3), dtype=np.uint8)
    picture = Image.fromarray(colours)
    exif = Image.Exif()
    exif[0x0112] = 6

    def write(image: Image.Image, kind: str, **options: Any) -> bytes:
        file = io.BytesIO()
        image.save(file, format=kind, **options)
        return file.getvalue()

    frames = [picture.quantize(8), picture.transpose(Image.Transpose.ROTATE_180).quantize(8)]
    return {
        "jpeg": write(picture, "JPEG", exif=exif),
        "jpeg-progressive": write(picture, "JPEG", progressive=True),
        "jpeg-grey": write(picture.convert("L"), "JPEG"),
        "jpeg-cmyk": write(picture.convert("CMYK"), "JPEG"),
        "png": write(picture, "PNG", exif=exif),
        "png-palette": write(picture.quantize(16), "PNG", transparency=3),
        "png-alpha": write(picture.convert("RGBA"), "PNG"),
        "png-16": write(Image.fromarray(colours[:, :, 0].astype(np.uint16) * 257), "PNG"),
        "webp": write(picture, "WEBP", exif=exif),
        "webp-lossless": write(picture.convert("RGBA"), "WEBP", lossless=True),
        "webp-animated": write(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        "gif": write(picture.quantize(16), "GIF"),
        "gif-animated": write(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "bmp": write(picture, "BMP"),
        "bmp-palette": write(picture.quantize(16), "BMP"),
        "tiff": write(picture, "TIFF", exif=exif),
        "tiff-lzw": write(picture, "TIFF", compression="tiff_lzw"),
        "tiff-deflate": write(picture, "TIFF", compression="tiff_adobe_deflate"),
        "tiff-jpeg": write(picture, "TIFF", compression="jpeg"),
        "tiff-packbits": write(picture.convert("L"), "TIFF", compression="packbits"),
        "tiff-group4": write(picture.convert("1"), "TIFF", compression="group4"),
    }


def damaged(data: bytes, *, number: int) -> bytes:
    """Damage a file, in a way that follows from the number alone."""
    rng = np.random.default_rng(number)
    found = bytearray(data)
    for _ in range(int(rng.integers(1, 6))):
        # Headers are short and stand in front: half of the damage is done there.
        reach = len(found) if rng.random() < 0.5 else min(len(found), 200)
        at = int(rng.integers(0, max(1, reach)))
        match int(rng.integers(0, 7)):
            case 0:
                found[at : at + 1] = bytes([int(rng.integers(256))])
            case 1:
                found[at : at + 1] = bytes(
                    [(found[at] if at < len(found) else 0) ^ (1 << number % 8)]
                )
            case 2:
                del found[at:]
            case 3:
                del found[at : at + int(rng.integers(1, 40))]
            case 4:
                found[at:at] = found[at : at + int(rng.integers(1, 80))]
            case 5:
                found[at : at + 4] = rng.bytes(4)
            case _:
                value = INTERESTING[int(rng.integers(len(INTERESTING)))]
                order, size = ("<>"[int(rng.integers(2))], "BHI"[int(rng.integers(3))])
                most = (1 << 8 * struct.calcsize(size)) - 1
                piece = struct.pack(order + size, value & most)
                found[at : at + len(piece)] = piece
        if not found:
            return b""
    return bytes(found)


def inputs(first: int) -> Iterator[tuple[str, int, bytes]]:
    """Yield damaged files of all formats in turn, without end."""
    whole = formats()
    number = first
    while True:
        for name, data in whole.items():
            yield name, number, damaged(data, number=number)
        number += 1


def run(
    *,
    first: int = 0,
    num_rounds: int | None = None,
    seconds: float | None = None,
    read: Callable[[bytes], Any] | None = None,
) -> Outcome:
    """Read damaged files; an end that is neither pixels nor `Refused` is a fault.

    Args:
        first: the number of the first round; a round has one file of each format.
        num_rounds: how many, None: as many as fit into `seconds`.
        seconds: how long.
        read: what reads them; by default our decoder.
    """
    read = read or (lambda data: decode(data, max_area_px=MAX_AREA_PX))
    outcome = Outcome()
    began = time.monotonic()
    for name, number, data in inputs(first):
        if num_rounds is not None and number >= first + num_rounds:
            break
        if seconds is not None and time.monotonic() - began > seconds:
            break
        start = time.monotonic()
        try:
            read(data)
            outcome.ends["pixels"] += 1
        except Refused as error:
            outcome.ends[error.reason] += 1
        except Exception as error:
            outcome.faults.append(f"{name} {number}: {type(error).__name__}: {error}")
        took = time.monotonic() - start
        outcome.num_inputs += 1
        if took > outcome.slowest_s:
            outcome.slowest_s, outcome.slowest = took, f"{name} {number}"
    return outcome


def main() -> None:
    """Run and print the outcome as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    before = _peak_bytes()
    outcome = run(first=options.first, num_rounds=options.rounds, seconds=options.seconds)
    grown = _peak_bytes() - before
    print(json.dumps({**vars(outcome), "grown_bytes": grown}))
    sys.exit(bool(outcome.faults))


def _peak_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
