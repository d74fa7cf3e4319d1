"""What is indexed, what is quarantined and why, and when the run stops."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from diptych.core.errors import DataError
from diptych.core.tables import QUARANTINE, SAMPLE_INDEX
from diptych.data.index import REASONS, IndexParams, index
from diptych.data.reasons import Refused
from diptych.data.sources import SourceParams, gather
from diptych.data.splits import Claim, assign_splits
from tests.data.conftest import Dataset, encoded, pixels

LENIENT = IndexParams(max_quarantined_fraction=1.0)


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
    dataset: Dataset, spoil: Callable[[Dataset], None]
) -> None:
    dataset.fill(4)
    spoil(dataset)
    sample_index, quarantine = index(dataset.write("rows.jsonl"), LENIENT)
    assert sample_index["key"].to_pylist() == [f"toy/good-{number}" for number in range(4)]
    (row,) = quarantine.to_pylist()
    assert row["reason"] == BAD[spoil]
    assert row["source"] == "toy"
    assert row["detail"].startswith("line-5: ")
    assert row["value"] is not None
    expected = {_malformed: "toy/line-5", _duplicate: "toy/good-0"}
    assert row["key"] == expected.get(spoil, "toy/bad")
    with_image = BAD[spoil].endswith(("_image", "_pixels", "_aspect", "_escapes"))
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
def test_unusual_images_are_indexed(dataset: Dataset, make: Callable) -> None:
    name, data = make(Image.fromarray(pixels(21, 13)))
    dataset.add("odd", dataset.file(name, data=data))
    sample_index, quarantine = index(dataset.write(), IndexParams())
    assert quarantine.num_rows == 0
    (row,) = sample_index.to_pylist()
    assert (row["widths_px"], row["heights_px"]) == ([21], [13])
    assert row["image_formats"] == ["jpeg" if name.endswith("jpg") else "png"]


def test_a_one_pixel_image_is_read_unless_a_longer_side_is_asked_for(dataset: Dataset) -> None:
    dataset.add("tiny", dataset.image("tiny.png", width_px=1, height_px=1))
    dataset.add("fine", dataset.image("fine.png", width_px=8, height_px=8))
    sample_index, _ = index(dataset.write(), IndexParams())
    assert sample_index["widths_px"].to_pylist() == [[1], [8]]
    _, quarantine = index(dataset.write(), IndexParams(min_side_px=2, max_quarantined_fraction=0.5))
    assert quarantine["reason"].to_pylist() == ["too_small"]


def test_limits_come_from_the_parameters(dataset: Dataset) -> None:
    dataset.add("a", dataset.image("a.png", width_px=30, height_px=10))
    for params, reason in (
        ({"max_image_area_px": 299}, "too_many_pixels"),
        ({"max_image_bytes": 20}, "too_many_bytes"),
        ({"max_aspect": 2.9}, "extreme_aspect"),
    ):
        with pytest.raises(DataError, match=reason):
            index(dataset.write(), IndexParams(**params))
    assert index(dataset.write(), IndexParams(max_image_area_px=300, max_aspect=3))[0].num_rows == 1
    with pytest.raises(ValidationError):
        IndexParams(max_image_area_px=400_000_000)


def test_tables_have_their_columns_and_every_row_is_in_one(dataset: Dataset) -> None:
    dataset.fill(6)
    dataset.add(None, dataset.image("a.jpg", width_px=9, height_px=8), kinds=["what"])
    dataset.add("two", "a.jpg", "good-0.png", answer="ä")
    dataset.add("text")
    dataset.rows += [3, "", {"id": "x"}]
    _missing(dataset)
    sample_index, quarantine = index(dataset.write(), LENIENT)
    assert sample_index.schema.equals(SAMPLE_INDEX)
    assert quarantine.schema.equals(QUARANTINE)
    assert sample_index.num_rows + quarantine.num_rows == len(dataset.rows) == 13
    assert set(quarantine["reason"].to_pylist()) <= set(REASONS)
    assert quarantine["key"].to_pylist() == ["toy/row-10", "toy/row-11", "toy/x", "toy/bad"]
    rows = {row["key"]: row for row in sample_index.to_pylist()}
    assert rows["toy/row-7"]["kinds"] == ["what"]
    assert rows["toy/two"] | {"content_sha256": ""} == {
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
        "image_paths": ["a.jpg", "good-0.png"],
        "image_formats": ["jpeg", "png"],
        "widths_px": [9, 10],
        "heights_px": [8, 10],
        "text_bytes": len("<image>\n<image>\nWhat is it?") + 2,
        "content_sha256": "",
        "status": "ok",
    }
    assert rows["toy/text"]["image_paths"] == []


def test_content_is_messages_and_image_bytes_and_no_names(dataset: Dataset) -> None:
    dataset.add("a", dataset.image("a.png"))
    dataset.add("b", dataset.image("b.png"))
    dataset.add("c", dataset.image("c.png", seed=1))
    dataset.add("d", "a.png", answer="else")
    dataset.add("e", "a.png", "c.png")
    dataset.add("f", "c.png", "a.png")
    hashes = index(dataset.write(), IndexParams())[0]["content_sha256"].to_pylist()
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 5


def test_too_much_quarantine_stops_with_reasons_and_examples(dataset: Dataset) -> None:
    dataset.fill(95)
    for number in range(4):
        dataset.add(f"gone-{number}", f"gone-{number}.jpg")
    dataset.add("mute", "good-0.png", answer=" ")
    with pytest.raises(DataError) as caught:
        index(dataset.write(), IndexParams())
    message = str(caught.value)
    assert "5 of 100 samples (5.0%)" in message
    assert "missing_image: 4" in message
    assert "toy/gone-0" in message
    assert "toy/gone-2" in message
    assert "toy/gone-3" not in message
    assert "empty_answer: 1" in message
    assert "1.0% (max_quarantined_fraction)" in message
    # Exactly the allowed fraction is allowed.
    assert index(dataset.write(), IndexParams(max_quarantined_fraction=0.05))[1].num_rows == 5


def test_no_sample_at_all_stops(dataset: Dataset) -> None:
    with pytest.raises(DataError, match="no sample"):
        index(dataset.write(), LENIENT)
    _missing(dataset)
    with pytest.raises(DataError, match="1 of 1 samples"):
        index(dataset.write(), LENIENT)


def test_a_heldout_sample_that_is_trained_on_is_a_leak(dataset: Dataset) -> None:
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
    sample_index, quarantine = index(gather(sources), LENIENT)
    assert sample_index["key"].to_pylist()[3:] == ["heldout/new"]
    (row,) = quarantine.to_pylist()
    assert (row["reason"], row["key"], row["value"]) == (
        "leaks_into_train",
        "heldout/copy",
        "train/good-0",
    )


def test_a_shared_image_is_never_in_both_splits(dataset: Dataset) -> None:
    dataset.fill(60)
    for number in range(0, 60, 3):
        names = [row["image"] for row in dataset.rows[number : number + 2]]
        dataset.add(f"pair-{number}", *names)
        dataset.add(f"text-{number}", question=f"And {number}?")
    sample_index, _ = index(dataset.write(heldout_fraction=0.4), IndexParams())
    again, _ = index(dataset.write(heldout_fraction=0.4), IndexParams())
    assert sample_index.equals(again)
    images: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for row in sample_index.to_pylist():
        images[row["split"]].update(row["image_paths"])
    assert images["train"]
    assert images["heldout"]
    assert not images["train"] & images["heldout"]
    share = sample_index["split"].to_pylist().count("heldout") / 100
    assert 0.2 < share < 0.6
    assert "heldout" not in index(dataset.write(), IndexParams())[0]["split"].to_pylist()


_HASHES = st.sampled_from([f"{number * 2654435761 % 2**64:016x}" for number in range(1, 12)])


@given(
    st.lists(
        st.builds(
            Claim,
            image_sha256s=st.lists(_HASHES, max_size=3).map(tuple),
            content_sha256=_HASHES,
            split=st.none(),
            heldout_fraction=st.just(0.5),
        ),
        max_size=20,
    ),
    st.randoms(use_true_random=False),
)
def test_splits_keep_images_together_in_any_order(claims: list[Claim], random) -> None:
    splits = assign_splits(claims)
    for claim, split in zip(claims, splits, strict=True):
        for other, other_split in zip(claims, splits, strict=True):
            if set(claim.image_sha256s) & set(other.image_sha256s):
                assert split == other_split
    order = list(range(len(claims)))
    random.shuffle(order)
    assert assign_splits([claims[place] for place in order]) == [splits[place] for place in order]


def test_an_open_split_follows_a_fixed_one() -> None:
    claims = [
        Claim(("f" * 64,), "1" * 64, None, 0.5),
        Claim(("f" * 64,), "2" * 64, "heldout", 0.0),
        Claim(("0" * 64,), "3" * 64, None, 0.5),
        Claim(("0" * 64,), "4" * 64, "train", 0.0),
        Claim(("0" * 64, "f" * 64), "5" * 64, "heldout", 0.0),
    ]
    # The last one joins both groups; what is fixed stays, and the open ones go to training.
    assert assign_splits(claims) == ["train", "heldout", "train", "train", "heldout"]
    assert assign_splits(claims[:4]) == ["heldout", "heldout", "train", "train"]


def test_an_image_is_read_once_however_many_samples_name_it(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = dataset.image("a.jpg")
    for number in range(5):
        dataset.add(f"ask-{number}", name, answer=str(number))
        dataset.add(f"bad-{number}", "gone.jpg", answer=str(number))
    raw_samples = dataset.write()
    read: list[str] = []
    original = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        read.append(path.name)
        return original(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    sample_index, quarantine = index(raw_samples, LENIENT)
    assert (sample_index.num_rows, quarantine.num_rows) == (5, 5)
    assert quarantine["value"].to_pylist() == ["gone.jpg"] * 5
    assert read.count("a.jpg") == 1


def test_a_sample_index_can_be_kept_as_parquet(dataset: Dataset) -> None:
    import pyarrow.parquet as pq

    dataset.fill(2)
    dataset.add("text")
    sample_index, _ = index(dataset.write(), IndexParams())
    file = io.BytesIO()
    pq.write_table(sample_index, file)
    assert pq.read_table(pa.BufferReader(file.getvalue())).equals(sample_index)


def test_reasons_are_a_closed_list() -> None:
    with pytest.raises(AssertionError, match="not in REASONS"):
        Refused("because", detail="no such code")
    assert all(sentence.endswith(".") for sentence in REASONS.values())
