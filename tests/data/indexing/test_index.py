"""What is indexed, what is quarantined and why, and when the run stops."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from PIL import Image
from pydantic import ValidationError

from diptych.core.errors import DataError
from diptych.core.hashing import sha256_folder
from diptych.core.records import RawSamples
from diptych.core.tables import QUARANTINE, SAMPLE_INDEX
from diptych.data.indexing import index as index_module
from diptych.data.indexing import survey as survey_module
from diptych.data.indexing.index import REASONS, IndexParams, index
from diptych.data.reasons import UNCOUNTED, Refused
from diptych.data.sources import SourceParams, gather
from diptych.data.sources.blobs import BlobReader
from tests.data.conftest import Dataset, encoded, pixels
from tests.data.indexing.conftest import LENIENT


def _png_promising(width_px: int, height_px: int) -> bytes:
    data = bytearray(encoded(Image.new("L", (1, 1)), format="PNG"))
    data[16:24] = struct.pack(">II", width_px, height_px)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def _missing(dataset: Dataset) -> None:
    dataset.add("bad", "nowhere.jpg")


def _missing_below_a_file(dataset: Dataset) -> None:
    dataset.image("a.jpg")
    dataset.add("bad", "a.jpg/b.jpg")


def _name_too_long(dataset: Dataset) -> None:
    dataset.add("bad", "a" * 300 + ".jpg")


def _truncated(dataset: Dataset) -> None:
    whole = encoded(Image.fromarray(pixels(40, 40)), format="JPEG")
    dataset.add("bad", dataset.file("cut.jpg", data=whole[:-100]))


def _empty_file(dataset: Dataset) -> None:
    dataset.add("bad", dataset.file("empty.jpg", data=b""))


def _bomb(dataset: Dataset) -> None:
    dataset.add("bad", dataset.file("bomb.png", data=_png_promising(20_000, 20_000)))


def _no_image(dataset: Dataset) -> None:
    dataset.add("bad", dataset.file("page.jpg", data=b"<html>not found</html>"))


def _folder(dataset: Dataset) -> None:
    (dataset.folder / "images" / "folder").mkdir()
    dataset.add("bad", "folder")


def _pipe(dataset: Dataset) -> None:
    os.mkfifo(dataset.folder / "images" / "pipe.jpg")
    dataset.add("bad", "pipe.jpg")


def _float(dataset: Dataset) -> None:
    data = encoded(Image.new("F", (9, 9)), format="TIFF")
    dataset.add("bad", dataset.file("float.tif", data=data))


def _long(dataset: Dataset) -> None:
    dataset.add("bad", dataset.image("long.png", width_px=201, height_px=1))


def _parent(dataset: Dataset) -> None:
    (dataset.folder / "secret.jpg").write_bytes(encoded(Image.new("L", (9, 9)), format="JPEG"))
    dataset.add("bad", "../secret.jpg")


def _absolute(dataset: Dataset) -> None:
    dataset.add("bad", str(dataset.folder / "images" / "good-0.png"))


def _link(dataset: Dataset) -> None:
    (dataset.folder / "secret.jpg").write_bytes(encoded(Image.new("L", (9, 9)), format="JPEG"))
    (dataset.folder / "images" / "link.jpg").symlink_to(dataset.folder / "secret.jpg")
    dataset.add("bad", "link.jpg")


def _loop(dataset: Dataset) -> None:
    (dataset.folder / "images" / "loop.jpg").symlink_to("loop.jpg")
    dataset.add("bad", "loop.jpg")


def _placeholders(dataset: Dataset) -> None:
    dataset.add("bad", dataset.image("a.jpg"), question="<image> again?")


def _empty_answer(dataset: Dataset) -> None:
    dataset.add("bad", dataset.image("a.jpg"), answer="")


def _duplicate(dataset: Dataset) -> None:
    dataset.add("good-0", dataset.image("a.jpg"))


def _malformed(dataset: Dataset) -> None:
    dataset.rows.append('{"id": "bad", "conversations": [')


BAD = {
    _missing: "missing_image",
    _missing_below_a_file: "missing_image",
    _name_too_long: "missing_image",
    _truncated: "truncated_image",
    _empty_file: "truncated_image",
    _bomb: "too_many_pixels",
    _no_image: "unreadable_image",
    _folder: "unreadable_image",
    _pipe: "unreadable_image",
    _float: "unsupported_pixels",
    _long: "extreme_aspect",
    _parent: "path_escapes",
    _absolute: "path_escapes",
    _link: "path_escapes",
    _loop: "missing_image",
    _placeholders: "placeholder_mismatch",
    _empty_answer: "empty_answer",
    _duplicate: "duplicate_id",
    _malformed: "malformed_json",
}


@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__)
def test_bad_input_is_quarantined_with_its_reason(
    dataset: Dataset, spoil: Callable[[Dataset], None], look
) -> None:
    dataset.fill(4)
    spoil(dataset)
    sample_index, quarantine = look(dataset.write("rows.jsonl"))
    assert sample_index["key"].to_pylist() == [f"toy/good-{number}" for number in range(4)]
    (row,) = quarantine.to_pylist()
    assert row["reason"] == BAD[spoil]
    assert row["source"] == "toy"
    assert row["detail"].startswith("line-5: ")
    assert row["value"] is not None
    expected = {_malformed: "toy/line-5", _duplicate: "toy/good-0"}
    assert row["key"] == expected.get(spoil, "toy/bad")
    with_image = BAD[spoil].endswith(("_image", "_pixels", "_aspect", "_escapes", "_id"))
    assert (row["image_path"] is not None) == with_image


def _cmyk(image: Image.Image) -> tuple[str, bytes]:
    return "cmyk.jpg", encoded(image.convert("CMYK"), format="JPEG")


def _palette(image: Image.Image) -> tuple[str, bytes]:
    return "palette.png", encoded(image.quantize(8), format="PNG")


def _sixteen(image: Image.Image) -> tuple[str, bytes]:
    return "sixteen.png", encoded(image.convert("L").convert("I;16"), format="PNG")


def _exif(image: Image.Image) -> tuple[str, bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = image.transpose(Image.Transpose.ROTATE_90)
    return "exif.jpg", encoded(turned, format="JPEG", exif=exif)


@pytest.mark.parametrize("make", [_cmyk, _palette, _sixteen, _exif])
def test_unusual_images_are_indexed(dataset: Dataset, look, make: Callable) -> None:
    name, data = make(Image.fromarray(pixels(21, 13)))
    dataset.add("odd", dataset.file(name, data=data))
    sample_index, quarantine = look(None, IndexParams())
    assert quarantine.num_rows == 0
    (row,) = sample_index.to_pylist()
    assert (row["widths_px"], row["heights_px"]) == ([21], [13])
    assert row["image_formats"] == ["jpeg" if name.endswith("jpg") else "png"]


def test_a_one_pixel_image_is_read_unless_a_longer_side_is_asked_for(
    dataset: Dataset, look
) -> None:
    dataset.add("tiny", dataset.image("tiny.png", width_px=1, height_px=1))
    dataset.add("fine", dataset.image("fine.png", width_px=8, height_px=8))
    sample_index, _ = look(None, IndexParams())
    assert sample_index["widths_px"].to_pylist() == [[1], [8]]
    _, quarantine = look(None, IndexParams(min_side_px=2, max_quarantined_fraction=0.5))
    assert quarantine["reason"].to_pylist() == ["too_small"]


def test_limits_come_from_the_parameters(dataset: Dataset, look) -> None:
    dataset.add("a", dataset.image("a.png", width_px=30, height_px=10))
    for params, reason in (
        ({"max_image_area_px": 299}, "too_many_pixels"),
        ({"max_text_bytes": 10}, "too_much_text"),
        ({"max_image_bytes": 20}, "too_many_bytes"),
        ({"max_aspect": 2.9}, "extreme_aspect"),
    ):
        with pytest.raises(DataError, match=reason):
            look(None, IndexParams(**params))
    assert look(None, IndexParams(max_image_area_px=300, max_aspect=3))[0].num_rows == 1
    with pytest.raises(ValidationError):
        IndexParams(max_image_area_px=400_000_000)


def test_tables_have_their_columns_and_every_row_is_in_one(dataset: Dataset, look) -> None:
    dataset.fill(6)
    dataset.add(None, dataset.image("a.jpg", width_px=9, height_px=8), kinds=["what"])
    dataset.add("two", "a.jpg", "good-0.png", answer="ä")
    dataset.add("text")
    dataset.rows += [3, "", {"id": "x"}]
    _missing(dataset)
    sample_index, quarantine = look()
    assert sample_index.schema.equals(SAMPLE_INDEX)
    assert quarantine.schema.equals(QUARANTINE)
    assert sample_index.num_rows + quarantine.num_rows == len(dataset.rows) == 13
    assert set(quarantine["reason"].to_pylist()) <= set(REASONS)
    assert quarantine["key"].to_pylist() == ["toy/row-10", "toy/row-11", "toy/x", "toy/bad"]
    rows = {row["key"]: row for row in sample_index.to_pylist()}
    assert rows["toy/row-7"]["kinds"] == ["what"]
    folder = dataset.folder / "images"
    files = [(folder / name).read_bytes() for name in ("a.jpg", "good-0.png")]
    assert rows["toy/two"] | {"content_hash": ""} == {
        "key": "toy/two",
        "source": "toy",
        "split": "train",
        "messages": json.dumps(
            [
                {"role": "user", "text": "<image>\n<image>\nWhat is it?"},
                {"role": "assistant", "text": "ä"},
            ],
            separators=(",", ":"),
            ensure_ascii=False,
        ),
        "kinds": [],
        "image_names": ["a.jpg", "good-0.png"],
        "image_files": ["a.jpg", "good-0.png"],
        "image_offsets": [-1, -1],
        "image_lengths": [len(data) for data in files],
        "image_hashes": [xxhash.xxh3_128(data).hexdigest() for data in files],
        "image_formats": ["jpeg", "png"],
        "widths_px": [9, 10],
        "heights_px": [8, 10],
        "text_bytes": len("<image>\n<image>\nWhat is it?") + 2,
        "content_hash": "",
        "status": "ok",
    }
    assert rows["toy/text"]["image_names"] == []


def test_content_is_messages_and_image_bytes_and_no_names(dataset: Dataset, look) -> None:
    dataset.add("a", dataset.image("a.png"))
    dataset.add("b", dataset.image("b.png"))
    dataset.add("c", dataset.image("c.png", seed=1))
    dataset.add("d", "a.png", answer="else")
    dataset.add("e", "a.png", "c.png")
    dataset.add("f", "c.png", "a.png")
    hashes = look(None, IndexParams(duplicates="keep"))[0]["content_hash"].to_pylist()
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 5


def test_too_much_quarantine_stops_with_reasons_and_examples(dataset: Dataset, look) -> None:
    dataset.fill(95)
    for number in range(4):
        dataset.add(f"gone-{number}", f"gone-{number}.jpg")
    dataset.add("mute", "good-0.png", answer=" ")
    with pytest.raises(DataError) as caught:
        look(None, IndexParams())
    message = str(caught.value)
    assert "5 of 100 samples (5.0%)" in message
    assert "missing_image: 4" in message
    assert "toy/gone-0" in message
    assert "toy/gone-2" in message
    assert "toy/gone-3" not in message
    assert "empty_answer: 1" in message
    assert "1.0% (max_quarantined_fraction)" in message
    # Exactly the allowed fraction is allowed.
    assert look(None, IndexParams(max_quarantined_fraction=0.05))[1].num_rows == 5


def test_no_sample_at_all_stops(dataset: Dataset, look) -> None:
    with pytest.raises(DataError, match="no sample"):
        look()
    _missing(dataset)
    with pytest.raises(DataError, match="1 of 1 samples"):
        look()


def test_a_heldout_sample_that_is_trained_on_is_a_leak(dataset: Dataset, look) -> None:
    dataset.fill(3)
    train, heldout = dataset.folder / "train.json", dataset.folder / "heldout.json"
    train.write_text(json.dumps(dataset.rows))
    dataset.image("copy.png", width_px=10, height_px=10, seed=0)
    dataset.rows = []
    dataset.add("copy", "copy.png", answer="0")
    dataset.add("new", "good-1.jpg", answer="else")
    heldout.write_text(json.dumps(dataset.rows))
    images = str(dataset.folder / "images")
    sources = {
        name: SourceParams(kind="llava", path=str(path), images=images, split=name)
        for name, path in (("train", train), ("heldout", heldout))
    }
    sample_index, quarantine = look(gather(sources), LENIENT)
    assert sample_index["key"].to_pylist()[3:] == []
    leaks = [(row["reason"], row["key"], row["value"]) for row in quarantine.to_pylist()]
    assert leaks == [
        ("leaks_into_train", "heldout/copy", "train/good-0"),
        ("image_leaks_into_train", "heldout/new", "train/good-1"),
    ]
    by_content = IndexParams(max_quarantined_fraction=1, leakage="content")
    sample_index, quarantine = look(gather(sources), by_content)
    assert sample_index["key"].to_pylist()[3:] == ["heldout/new"]
    assert quarantine["key"].to_pylist() == ["heldout/copy"]


def test_a_shared_image_is_never_in_both_splits(dataset: Dataset, look) -> None:
    dataset.fill(60)
    for number in range(0, 60, 3):
        names = [row["image"] for row in dataset.rows[number : number + 2]]
        dataset.add(f"pair-{number}", *names)
        dataset.add(f"text-{number}", question=f"And {number}?")
    sample_index, _ = look(dataset.write(heldout_fraction=0.4), IndexParams())
    again, _ = look(dataset.write(heldout_fraction=0.4), IndexParams())
    assert sample_index.equals(again)
    images: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for row in sample_index.to_pylist():
        images[row["split"]].update(row["image_names"])
    assert images["train"]
    assert images["heldout"]
    assert not images["train"] & images["heldout"]
    share = sample_index["split"].to_pylist().count("heldout") / 100
    assert 0.2 < share < 0.6
    assert "heldout" not in look(None, IndexParams())[0]["split"].to_pylist()


def test_an_image_is_read_once_however_many_samples_name_it(
    dataset: Dataset, look, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = dataset.image("a.jpg")
    for number in range(5):
        dataset.add(f"ask-{number}", name, answer=str(number))
        dataset.add(f"bad-{number}", "gone.jpg", answer=str(number))
    raw_samples = dataset.write()
    read: list[str] = []
    original = BlobReader.read

    def read_once(reader: BlobReader, **place) -> bytes:
        read.append(place["file"])
        return original(reader, **place)

    monkeypatch.setattr(BlobReader, "read", read_once)
    sample_index, quarantine = look(raw_samples)
    assert (sample_index.num_rows, quarantine.num_rows) == (5, 5)
    assert quarantine["value"].to_pylist() == ["gone.jpg"] * 5
    assert sorted(read) == ["a.jpg", "gone.jpg"]


def test_the_first_of_equal_samples_stays_and_the_others_are_not_counted(
    dataset: Dataset, look
) -> None:
    dataset.fill(2)
    dataset.image("copy.png", width_px=10, height_px=10, seed=0)
    for number in range(3):
        dataset.add(f"copy-{number}", "copy.png", answer="0")
    sample_index, quarantine = look(None, IndexParams(max_quarantined_fraction=0))
    assert sample_index["key"].to_pylist() == ["toy/good-0", "toy/good-1"]
    rows = quarantine.to_pylist()
    assert [row["key"] for row in rows] == [f"toy/copy-{number}" for number in range(3)]
    assert {(row["reason"], row["value"]) for row in rows} == {("duplicate_content", "toy/good-0")}
    assert rows[0]["detail"] == "row-3: The sample 'toy/good-0' has the same messages and images"
    length = (dataset.folder / "images" / "copy.png").stat().st_size
    place = [rows[0][name] for name in ("image_path", "image_file", "image_offset", "image_length")]
    assert place == ["copy.png", "copy.png", -1, length]
    assert look(None, IndexParams(duplicates="keep"))[0].num_rows == 5


def test_decoding_finds_what_headers_do_not_say(dataset: Dataset, look) -> None:
    dataset.fill(3)
    data = bytearray(encoded(Image.fromarray(pixels(64, 64)), format="PNG"))
    start = data.index(b"IDAT") + 4
    data[start + 2 : start + 40] = bytes(38)
    dataset.add("bad", dataset.file("bad.png", data=bytes(data)))
    assert look(None, LENIENT)[1].num_rows == 0
    _, quarantine = look(None, IndexParams(verify="decode", max_quarantined_fraction=1))
    assert quarantine["reason"].to_pylist() == ["unreadable_image"]
    assert quarantine["image_file"].to_pylist() == ["bad.png"]


def _two_sources(dataset: Dataset) -> RawSamples:
    """Two files of one source and one of another, with shared images and bad rows."""
    dataset.fill(30)
    for number in range(0, 30, 5):
        dataset.add(f"pair-{number}", dataset.rows[number]["image"], dataset.rows[-1]["image"])
    _missing(dataset)
    rows = dataset.rows
    for name, part in (("a", rows[:20]), ("b", rows[15:]), ("c", rows[3:9])):
        (dataset.folder / f"{name}.json").write_text(json.dumps(part))
    paths = [str(dataset.folder / f"{name}.json") for name in "ab"]
    images = str(dataset.folder / "images")
    first = SourceParams(kind="llava", path=paths, images=images, heldout_fraction=0.3)
    other = str(dataset.folder / "c.json")
    second = SourceParams(kind="llava", path=other, images=images, heldout_fraction=0.3)
    return gather({"first": first, "second": second})


def test_processes_change_no_byte(
    dataset: Dataset, look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    raw_samples = _two_sources(dataset)
    _, alone = look(raw_samples)
    expected = sha256_folder(dataset.folder / "sample_index")
    monkeypatch.setattr(index_module, "_SMALL_BYTES", 0)
    params = IndexParams(max_quarantined_fraction=1, num_processes=2)
    folder, quarantine = index(raw_samples, params, str(tmp_path / "elsewhere"))
    assert sha256_folder(folder) == expected
    assert quarantine.equals(alone)
    assert {"duplicate_id", "duplicate_content", "missing_image"} <= set(
        quarantine["reason"].to_pylist()
    )
    assert [path.name for path in sorted(folder.iterdir())] == [
        "000000-first.parquet",
        "000001-first.parquet",
    ]


def test_a_stopped_run_goes_on_from_its_finished_parts(
    dataset: Dataset, look, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw_samples = _two_sources(dataset)
    look(raw_samples)
    expected = sha256_folder(dataset.folder / "sample_index")
    examined: list[str] = []
    original = survey_module.read_part

    def read_part(source, part):
        if part.path in examined or len(examined) == 2:
            raise KeyboardInterrupt
        examined.append(part.path)
        return original(source, part)

    monkeypatch.setattr(survey_module, "read_part", read_part)
    with pytest.raises(KeyboardInterrupt):
        look(raw_samples)
    # What was there before is still whole.
    assert sha256_folder(dataset.folder / "sample_index") == expected
    first, examined[:] = list(examined), []
    look(raw_samples)
    assert len(first) == 2
    assert len(examined) == 1
    assert sha256_folder(dataset.folder / "sample_index") == expected
    names = [path.name for path in dataset.folder.iterdir() if path.name.startswith(".")]
    assert names == []


def test_reasons_are_a_closed_list() -> None:
    with pytest.raises(AssertionError, match="not in REASONS"):
        Refused("because", detail="no such code")
    assert all(sentence.endswith(".") for sentence in REASONS.values())
    assert set(REASONS) >= UNCOUNTED
