"""Reading images where they lie."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from diptych.core.errors import DataError
from diptych.core.records import RawSource
from diptych.data.reasons import Refused
from diptych.data.sources.blobs import BlobReader, is_inline, read_inline
from tests.data.conftest import put
from tests.data.servers import Proxy


def _source(root: str, *, images: str | None = None, kind: Any = "llava") -> RawSource:
    return RawSource(name="toy", kind=kind, root=root, images=images or root, parts=())


def _read(reader: BlobReader, file: str, *, offset: int = -1, length: int = -1) -> bytes:
    return reader.read(file=file, offset=offset, length=length, place=0)


def test_whole_files_lie_below_the_images_and_ranges_below_the_root(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"one")
    (tmp_path / "images" / "empty.png").touch()
    (tmp_path / "a.tar").write_bytes(b"0123456789")
    source = _source(str(tmp_path), images=str(tmp_path / "images"), kind="webdataset")
    reader = BlobReader(source)
    assert _read(reader, "a.png") == b"one"
    assert _read(reader, "empty.png") == b""
    assert _read(reader, "a.tar", offset=3, length=4) == b"3456"
    assert _read(reader, "a.tar", offset=0, length=2) == b"01"


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("none.png", "missing_image"),
        ("a.png/b.png", "missing_image"),
        ("n" * 300, "missing_image"),
        ("../secret.png", "path_escapes"),
        ("link.png", "path_escapes"),
        ("/etc/passwd", "path_escapes"),
        ("folder", "unreadable_image"),
        ("pipe.png", "unreadable_image"),
        ("big.png", "too_many_bytes"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_reason(
    tmp_path: Path, file: str, reason: str
) -> None:
    images = tmp_path / "images"
    (images / "folder").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (images / "link.png").symlink_to("../secret.png")
    (images / "a.png").write_bytes(b"one")
    (images / "big.png").write_bytes(b"x" * 101)
    os.mkfifo(images / "pipe.png")
    with pytest.raises(Refused) as caught:
        _read(BlobReader(_source(str(images)), max_bytes=100), file)
    assert caught.value.reason == reason
    assert caught.value.value


def test_a_tar_that_was_cut_off_since_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"0123")
    reader = BlobReader(_source(str(tmp_path), kind="webdataset"), max_bytes=100)
    for offset, length, reason in ((2, 4, "unreadable_image"), (0, 101, "too_many_bytes")):
        with pytest.raises(Refused) as caught:
            _read(reader, "a.tar", offset=offset, length=length)
        assert caught.value.reason == reason


def test_a_line_that_has_changed_is_refused(tmp_path: Path) -> None:
    reader = BlobReader(_source(str(tmp_path)))
    for content in (b"", b"{}", b"\xff", b'{"conversations": [{"from": "human", "value": "a"}]}'):
        (tmp_path / "a.jsonl").write_bytes(content)
        with pytest.raises(Refused):
            _read(reader, "a.jsonl", offset=0)


def test_remote_ranges_are_read_ahead(s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(range(256)) * 4
    put(s3, {"a.tar": content, "img/a b.png": b"one"}, bucket="blobs")
    monkeypatch.setattr("diptych.data.sources.blobs._READ_AHEAD_BYTES", 400)
    reader = BlobReader(_source("s3://blobs", images="s3://blobs/img", kind="webdataset"))
    assert _read(reader, "a b.png") == b"one"
    s3.plan()
    for offset in range(0, 400, 50):
        assert _read(reader, "a.tar", offset=offset, length=50) == content[offset : offset + 50]
    assert len(s3.requests) == 2  # the size, and one range
    assert _read(reader, "a.tar", offset=10, length=900) == content[10:910]
    assert _read(reader, "a.tar", offset=1000, length=24) == content[1000:]
    for file, offset, reason in (
        ("none.png", -1, "missing_image"),
        ("../a.tar", -1, "path_escapes"),
        ("a.tar", 1020, "unreadable_image"),
    ):
        with pytest.raises(Refused) as caught:
            _read(reader, file, offset=offset, length=24)
        assert caught.value.reason == reason


def test_a_server_that_fails_says_nothing_about_the_image(s3: Proxy) -> None:
    put(s3, {"a.png": b"one"}, bucket="blobs")
    reader = BlobReader(_source("s3://blobs"))
    assert _read(reader, "a.png") == b"one"
    s3.plan(*["503"] * 20)
    with pytest.raises(DataError, match="after 5 attempts") as caught:
        _read(reader, "a.png")
    assert not isinstance(caught.value, Refused)


def test_data_addresses() -> None:
    assert read_inline("data:image/png;base64,b25l") == b"one"
    assert is_inline("data:image/png;base64,b25l")
    assert not is_inline("data/a.png")
    for image in ("data:", "data:image/png,one", "data:;base64,###", "data:;base64,é"):
        with pytest.raises(Refused) as caught:
            read_inline(image)
        assert caught.value.reason == "unreadable_image"
