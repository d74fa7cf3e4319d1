"""The cache of cut images: bounded, shared, and never believed blindly."""

from __future__ import annotations

import logging
import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from diptych.data.images.cache import ImageCache

HEADER_BYTES = 24


def make_cache(folder: Path, *, max_bytes: int = 1 << 20, processor: str = "p" * 64) -> ImageCache:
    return ImageCache(folder, max_bytes=max_bytes, maker_sha256=processor)


def patches(number: int, *, count: int = 4, width: int = 12) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (count, width), dtype=np.uint8)


def name(number: int) -> str:
    return f"{number:032x}"


def images_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and len(path.name) == 32)


def test_what_is_put_is_found_by_others_and_later(tmp_path):
    cache = make_cache(tmp_path / "cache")
    assert cache.get(name(1)) is None
    cache.put(name(1), patches=patches(1))
    cache.put(name(2), patches=patches(2, count=9, width=75))
    for one in (cache, make_cache(tmp_path / "cache")):
        np.testing.assert_array_equal(one.get(name(1)), patches(1))
        np.testing.assert_array_equal(one.get(name(2)), patches(2, count=9, width=75))
        assert one.get(name(3)) is None


def test_another_processor_finds_nothing(tmp_path):
    make_cache(tmp_path).put(name(1), patches=patches(1))
    assert make_cache(tmp_path, processor="q" * 64).get(name(1)) is None


def test_it_is_bounded_and_keeps_what_came_first(tmp_path):
    each = HEADER_BYTES + 48
    cache = make_cache(tmp_path, max_bytes=3 * each + each // 2)
    for number in range(6):
        cache.put(name(number), patches=patches(number))
    assert [path.name for path in images_of(tmp_path)] == [name(number) for number in range(3)]
    assert sum(path.stat().st_size for path in images_of(tmp_path)) == 3 * each
    later = make_cache(tmp_path, max_bytes=3 * each + each // 2)
    later.put(name(9), patches=patches(9))
    assert later.get(name(9)) is None, "the bound is the folder's, not the process's"
    wider = make_cache(tmp_path, max_bytes=5 * each)
    wider.put(name(9), patches=patches(9))
    assert wider.get(name(9)) is not None


@pytest.mark.parametrize("damage", ["cut", "flip", "longer", "empty", "foreign", "magic"])
def test_a_damaged_entry_is_ignored_and_written_again(tmp_path, damage):
    cache = make_cache(tmp_path)
    cache.put(name(1), patches=patches(1))
    (path,) = images_of(tmp_path)
    content = path.read_bytes()
    path.write_bytes(
        {
            "cut": content[:-5],
            "flip": content[:30] + bytes([content[30] ^ 1]) + content[31:],
            "longer": content + b"x",
            "empty": b"",
            "foreign": b"\x80\x04N." * 20,
            "magic": b"diptych0" + content[8:],
        }[damage]
    )
    assert cache.get(name(1)) is None
    cache.put(name(1), patches=patches(1))
    np.testing.assert_array_equal(cache.get(name(1)), patches(1))
    assert path.read_bytes() == content


def _put_many(folder: Path, first: int) -> None:
    cache = make_cache(folder, max_bytes=50 * (HEADER_BYTES + 48))
    for number in range(first, first + 60):
        cache.put(name(number % 80), patches=patches(number % 80))


def test_processes_share_one_bound(tmp_path):
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=_put_many, args=(tmp_path, at)) for at in (0, 20)]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout=60)
        assert child.exitcode == 0
    found = images_of(tmp_path)
    assert 40 <= len(found) <= 50, "an image that two processes put at once may count twice"
    cache = make_cache(tmp_path)
    for path in found:
        np.testing.assert_array_equal(cache.get(path.name), patches(int(path.name, 16)))


def test_a_disk_that_fails_stops_nothing(tmp_path, caplog):
    (tmp_path / "cache").write_text("a file where the folder should be")
    cache = make_cache(tmp_path / "cache")
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            cache.put(name(number), patches=patches(number))
    assert cache.get(name(0)) is None
    assert len(caplog.records) == 1
    assert "takes no more images" in caplog.text
