"""Pictures are what a browser can show, small, and never a file that could not be decoded."""

from __future__ import annotations

import base64
import io
import zlib

import pytest
from PIL import Image

from diptych.report.pictures import MAX_IMAGE_BYTES, for_page, thumbnail


def test_large_image_is_made_smaller() -> None:
    noise = Image.effect_noise((900, 600), 80)
    out = io.BytesIO()
    noise.convert("RGBA").save(out, format="PNG")
    assert len(out.getvalue()) > MAX_IMAGE_BYTES
    media_type, data = for_page(out.getvalue())
    assert media_type == "image/jpeg"
    with Image.open(io.BytesIO(data)) as small:
        assert small.size == (480, 320)


def test_format_a_browser_cannot_show_is_converted() -> None:
    out = io.BytesIO()
    Image.new("L", (20, 10), 200).save(out, format="TIFF")
    media_type, data = for_page(out.getvalue())
    assert media_type == "image/jpeg"
    with Image.open(io.BytesIO(data)) as image:
        assert (image.format, image.size) == ("JPEG", (20, 10))


@pytest.mark.parametrize("data", [b"", b"no image", b"\xff\xd8\xff\xe0 cut"])
def test_unreadable_image_is_left_out(data: bytes) -> None:
    assert for_page(data) == ("", b"")


def test_bomb_is_not_decoded() -> None:
    header = io.BytesIO()
    Image.new("1", (1, 1)).save(header, format="PNG")
    data = bytearray(header.getvalue())
    data[16:24] = (8_000).to_bytes(4, "big") + (8_001).to_bytes(4, "big")
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    assert for_page(bytes(data)) == ("", b"")


def test_thumbnails_are_small() -> None:
    out = io.BytesIO()
    Image.effect_noise((900, 600), 80).save(out, format="PNG")
    media_type, _, body = (thumbnail(out.getvalue()) or "").partition(";base64,")
    assert media_type == "data:image/jpeg"
    with Image.open(io.BytesIO(base64.b64decode(body))) as small:
        assert max(small.size) == 160
    assert thumbnail(b"no image") is None


def test_a_file_that_ends_too_early_is_not_shown() -> None:
    out = io.BytesIO()
    Image.effect_noise((60, 60), 80).save(out, format="JPEG")
    assert for_page(out.getvalue())[0] == "image/jpeg"
    assert for_page(out.getvalue()[:-200]) == ("", b"")
