"""Headers and pixels of every format, held against Pillow's own answers."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from diptych.data.images.decode import check_area, decode, read_header
from diptych.data.images.headers import MAX_AREA_PX
from diptych.data.reasons import Refused
from tests.data.conftest import encoded, pixels

PICTURE = Image.fromarray(pixels(37, 23))
FORMATS = {
    "jpeg": encoded(PICTURE, format="JPEG", quality=92),
    "jpeg-grey": encoded(PICTURE.convert("L"), format="JPEG"),
    "jpeg-progressive": encoded(PICTURE, format="JPEG", progressive=True),
    "png": encoded(PICTURE, format="PNG"),
    "png-palette": encoded(PICTURE.quantize(16), format="PNG"),
    "png-1-bit": encoded(PICTURE.convert("1"), format="PNG"),
    "webp": encoded(PICTURE, format="WEBP", lossless=True),
    "gif": encoded(PICTURE.quantize(16), format="GIF"),
    "bmp": encoded(PICTURE, format="BMP"),
    "tiff": encoded(PICTURE, format="TIFF"),
    "tiff-lzw": encoded(PICTURE, format="TIFF", compression="tiff_lzw"),
}


def _upright(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def _reason(data: bytes, **limits: int) -> str:
    with pytest.raises(Refused) as caught:
        decode(data, **limits)
    return caught.value.reason


@pytest.mark.parametrize("name", FORMATS)
def test_header_and_pixels_equal_pillows(name: str) -> None:
    data = FORMATS[name]
    header = read_header(data)
    assert (header.width_px, header.height_px) == (37, 23)
    assert header.format == name.partition("-")[0]
    found = decode(data)
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, _upright(data))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation(format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x010F] = "a maker, so that the orientation is not the first tag"
    exif[0x0112] = orientation
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(PICTURE, format=format, exif=exif, **options)
    expected = _upright(data)
    header = read_header(data)
    assert (header.height_px, header.width_px) == expected.shape[:2]
    assert header.width_px == (23 if orientation >= 5 else 37)
    np.testing.assert_array_equal(decode(data), expected)


def test_exif_in_the_other_byte_order_and_damaged_exif() -> None:
    plain = FORMATS["jpeg"]

    def with_exif(tiff: bytes) -> bytes:
        segment = b"Exif\0\0" + tiff
        return plain[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + plain[2:]

    entry = struct.pack(">HHIHH", 0x0112, 3, 1, 6, 0)
    whole = b"MM\0*" + struct.pack(">IH", 8, 1) + entry + struct.pack(">I", 0)
    assert read_header(with_exif(whole)).orientation == 6
    np.testing.assert_array_equal(decode(with_exif(whole)), _upright(with_exif(whole)))
    for damaged in (whole[:20], b"", b"XX\0*" + whole[4:], whole.replace(b"\0\6", b"\0\t")):
        assert read_header(with_exif(damaged)).orientation == 1


def test_orientation_behind_the_pixels_of_a_png_counts() -> None:
    exif = struct.pack("<4sIHHHIHHI", b"II*\0", 8, 1, 0x0112, 3, 1, 8, 0, 0)
    body = b"eXIf" + exif
    chunk = struct.pack(">I", len(exif)) + body + struct.pack(">I", zlib.crc32(body))
    data = FORMATS["png"][:-12] + chunk + FORMATS["png"][-12:]
    header = read_header(data)
    assert (header.width_px, header.height_px, header.orientation) == (23, 37, 8)
    np.testing.assert_array_equal(decode(data), _upright(data))


def test_cmyk() -> None:
    data = encoded(PICTURE.convert("CMYK"), format="JPEG", quality=95)
    assert read_header(data).mode == "CMYK"
    error = np.abs(decode(data).astype(int) - np.asarray(PICTURE).astype(int))
    assert error.mean() < 4


def test_16_bit_grey_is_scaled_and_not_clipped() -> None:
    values = np.array([[0, 128, 257, 32768, 65407, 65535]], dtype=np.uint16)
    for format in ("PNG", "TIFF"):
        data = encoded(Image.fromarray(values), format=format)
        assert read_header(data).mode.startswith("I;16")
        np.testing.assert_array_equal(decode(data)[0, :, 0], [0, 0, 1, 128, 255, 255])
        assert decode(data).shape == (1, 6, 3)


def test_16_bit_rgb_png() -> None:
    row = b"\0" + np.array([[65535, 0, 32768]], dtype=">u2").tobytes()
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(row)),
        (b"IEND", b""),
    )
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )
    np.testing.assert_array_equal(decode(data), [[[255, 0, 128]]])


def test_alpha_lies_on_white() -> None:
    colours = np.array([[[200, 100, 0, 255], [200, 100, 0, 0], [200, 100, 0, 51]]], dtype=np.uint8)
    found = decode(encoded(Image.fromarray(colours), format="PNG"))
    # 51 is a fifth of 255: a fifth of the colour and four fifths of white.
    np.testing.assert_array_equal(found, [[[200, 100, 0], [255, 255, 255], [244, 224, 204]]])
    grey = np.array([[[0, 255], [0, 0]]], dtype=np.uint8)
    found = decode(encoded(Image.fromarray(grey), format="PNG"))
    np.testing.assert_array_equal(found[0, :, 0], [0, 255])


def test_a_transparent_palette_entry_is_white() -> None:
    image = Image.fromarray(np.array([[0, 1]], dtype=np.uint8)).convert("P")
    image.putpalette([10, 20, 30, 40, 50, 60])
    for format in ("PNG", "GIF"):
        data = encoded(image, format=format, transparency=1)
        assert read_header(data).mode in ("P", "L")
        np.testing.assert_array_equal(decode(data), [[[10, 20, 30], [255, 255, 255]]])


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP"])
def test_one_pixel(format: str) -> None:
    data = encoded(Image.new("RGB", (1, 1), (255, 255, 255)), format=format)
    assert read_header(data).area_px == 1
    np.testing.assert_array_equal(decode(data), np.full((1, 1, 3), 255))


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_cut_anywhere_is_refused_by_its_header_alone(name: str) -> None:
    data = FORMATS[name]
    for length in range(len(data)):
        with pytest.raises(Refused) as caught:
            read_header(data[:length])
        assert caught.value.reason in ("truncated_image", "unreadable_image")
    if name.startswith(("jpeg", "png")):
        with pytest.raises(Refused) as caught:
            read_header(data[: len(data) * 2 // 3])
        assert caught.value.reason == "truncated_image"


def test_a_cut_jpeg_is_seen_in_spite_of_its_thumbnails_end() -> None:
    thumbnail = b"Exif\0\0" + FORMATS["jpeg-grey"]
    segment = b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 2) + thumbnail
    data = FORMATS["jpeg"][:2] + segment + FORMATS["jpeg"][2:]
    assert read_header(data).width_px == 37
    with pytest.raises(Refused) as caught:
        read_header(data[:-10])
    assert caught.value.reason == "truncated_image"


def test_bytes_behind_the_end_do_no_harm() -> None:
    for name in ("jpeg", "png"):
        np.testing.assert_array_equal(
            decode(FORMATS[name] + b"trailer" * 9), _upright(FORMATS[name])
        )


def _promise(name: str, *, side: int) -> bytes:
    """Let a header promise side x side pixels."""
    data = bytearray(FORMATS[name])
    if name == "jpeg":
        frame = data.index(b"\xff\xc0")
        data[frame + 5 : frame + 9] = struct.pack(">HH", side, side)
    elif name == "png":
        data[16:24] = struct.pack(">II", side, side)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    elif name == "gif":
        data[6:10] = struct.pack("<HH", side, side)
    else:
        data[18:26] = struct.pack("<ii", side, side)
    return bytes(data)


@pytest.mark.parametrize("name", ["jpeg", "png", "gif", "bmp"])
def test_400_megapixels_are_refused_before_decoding(name: str) -> None:
    assert _reason(_promise(name, side=20_000)) == "too_many_pixels"


def test_the_limit_counts() -> None:
    data = FORMATS["png"]
    assert decode(data, max_area_px=37 * 23).shape == (23, 37, 3)
    assert _reason(data, max_area_px=37 * 23 - 1) == "too_many_pixels"
    header = read_header(_promise("jpeg", side=10_000))
    with pytest.raises(Refused, match=r"100,000,000 pixels, allowed are 89,478,485"):
        check_area(header, max_area_px=MAX_AREA_PX)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated_image"),
        (b"GIF89a", "unreadable_image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "unreadable_image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "unreadable_image"),
        (b"P6 1 1 255 abc", "unreadable_image"),
        (b"\xff\xd8\x00\x00", "unreadable_image"),
        (b"\xff\xd8\xff\xd9", "unreadable_image"),
        (_promise("png", side=0), "unreadable_image"),
        (encoded(Image.new("F", (3, 3)), format="TIFF"), "unsupported_pixels"),
        (FORMATS["jpeg"].replace(b"\xff\xc0", b"\xff\xc3"), "unsupported_pixels"),
    ],
)
def test_what_is_no_image_is_refused(data: bytes, reason: str) -> None:
    assert _reason(data) == reason
