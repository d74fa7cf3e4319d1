"""Reading Parquet tables as Hugging Face writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diptych.core.records import RawSource
from diptych.data.reasons import REASONS, Refused
from diptych.data.sources import RawRow, Refusal, SourceParams, gather, read_part
from diptych.data.sources.blobs import BlobReader
from diptych.data.sources.rows import parse
from diptych.data.sources.turns import make_value

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def _source(folder: Path, table: pa.Table, *, rows_per_group: int = 3, **params: Any) -> RawSource:
    path = folder / "train-00000-of-00001.parquet"
    pq.write_table(table, path, row_group_size=rows_per_group)
    params = {"kind": "parquet", "path": str(path)} | params
    return gather({"toy": SourceParams(**params)}).sources[0]


def _read(source: RawSource) -> list[RawRow | Refusal]:
    return [row for part in source.parts for row in read_part(source, part)]


def _turns(row: RawRow | Refusal) -> list[tuple[str, str]]:
    assert isinstance(row, RawRow)
    return [(message.role, message.text) for message in parse(row.value).messages]


def _images(source: RawSource, row: RawRow | Refusal) -> list[bytes]:
    """Read a row's images again where its blobs say they lie."""
    assert isinstance(row, RawRow)
    assert row.blobs is not None
    reader = BlobReader(source)
    return [
        reader.read(file=blob.file, offset=blob.offset, length=blob.length, place=place)
        for place, blob in enumerate(row.blobs)
    ]


def test_the_cauldron(tmp_path: Path) -> None:
    texts = pa.list_(
        pa.struct([("user", pa.string()), ("assistant", pa.string()), ("source", pa.string())])
    )
    table = pa.table(
        {
            "images": pa.array(
                [
                    [{"bytes": b"one", "path": None}, {"bytes": b"two", "path": "b.png"}],
                    [],
                ],
                pa.list_(IMAGE),
            ),
            "texts": pa.array(
                [
                    [
                        {"user": "Same?", "assistant": "No.", "source": "toy"},
                        {"user": "Why?", "assistant": "Colour.", "source": "toy"},
                    ],
                    [{"user": "1 + 1?", "assistant": "2", "source": "toy"}],
                ],
                texts,
            ),
        }
    )
    source = _source(tmp_path, table)
    first, second = _read(source)
    assert _turns(first) == [
        ("user", "<image>\n<image>\nSame?"),
        ("assistant", "No."),
        ("user", "Why?"),
        ("assistant", "Colour."),
    ]
    assert isinstance(first, RawRow)
    assert first.blobs is not None
    assert [blob.data for blob in first.blobs] == [b"one", b"two"]
    assert [blob.name for blob in first.blobs] == ["row-1-0", "b.png"]
    assert _images(source, first) == [b"one", b"two"]
    assert _turns(second) == [("user", "1 + 1?"), ("assistant", "2")]
    assert second.label == "row-2"


@pytest.mark.parametrize(
    ("columns", "turns"),
    [
        (
            {"caption": ["a cat"], "image": [b"x"]},
            [("user", "<image>\nDescribe the image."), ("assistant", "a cat")],
        ),
        (
            {"text": ["a cat"], "image": [b"x"]},
            [("user", "<image>\nDescribe the image."), ("assistant", "a cat")],
        ),
        (
            {"question": ["What?"], "answer": ["a cat"], "image": [b"x"]},
            [("user", "<image>\nWhat?"), ("assistant", "a cat")],
        ),
        (
            {"question": ["In <image>, what?"], "answers": [["a cat", "cat"]], "image": [b"x"]},
            [("user", "In <image>, what?"), ("assistant", "a cat")],
        ),
        (
            {
                "conversations": [
                    json.dumps(
                        [
                            {"from": "human", "value": "<image>\nWhat?"},
                            {"from": "gpt", "value": "a cat"},
                        ]
                    )
                ],
                "image": [b"x"],
            },
            [("user", "<image>\nWhat?"), ("assistant", "a cat")],
        ),
        (
            {
                "messages": [
                    [
                        {
                            "role": "user",
                            "content": [
                                {"type": "image", "text": None},
                                {"type": "text", "text": "What?"},
                            ],
                        },
                        {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]},
                    ]
                ],
                "images": [[b"x"]],
            },
            [("user", "<image>What?"), ("assistant", "a cat")],
        ),
    ],
)
def test_spellings(tmp_path: Path, columns: dict[str, Any], turns: list[tuple[str, str]]) -> None:
    source = _source(tmp_path, pa.table(columns))
    (row,) = _read(source)
    assert _turns(row) == turns
    assert _images(source, row) == [b"x"]


def test_columns_and_prompt_are_taken_from_the_parameters(tmp_path: Path) -> None:
    table = pa.table({"pic": [b"x"], "alt": ["a cat"], "uid": ["k"], "image": ["no.png"]})
    columns = {"image": "pic", "caption": "alt", "id": "uid"}
    (row,) = _read(_source(tmp_path, table, columns=columns, prompt="What is this?"))
    assert _turns(row) == [("user", "<image>\nWhat is this?"), ("assistant", "a cat")]
    assert isinstance(row, RawRow)
    assert row.value["id"] == "k"


def test_images_by_path_lie_in_the_folder_of_images(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    (images / "a.png").write_bytes(b"one")
    table = pa.table(
        {
            "image": pa.array(
                [{"bytes": None, "path": "a.png"}, {"bytes": None, "path": "../x.png"}], IMAGE
            ),
            "caption": ["a cat", "a dog"],
        }
    )
    source = _source(tmp_path, table, images=str(images))
    good, bad = _read(source)
    assert _images(source, good) == [b"one"]
    with pytest.raises(Refused) as caught:
        _images(source, bad)
    assert caught.value.reason == "path_escapes"


def test_rows_are_found_again_in_any_order_over_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.data.sources.cells._BATCH_BYTES", 300)
    images = [f"image {number} ".encode() * 10 for number in range(20)]
    table = pa.table({"image": images, "caption": [str(number) for number in range(20)]})
    source = _source(tmp_path, table, rows_per_group=7)
    rows = _read(source)
    assert [row.label for row in rows] == [f"row-{number}" for number in range(1, 21)]
    reader = BlobReader(source)
    for number in [*range(20), 19, 3, 4, 18, 0, 7, 6, 13, 14]:
        row = rows[number]
        assert isinstance(row, RawRow)
        assert row.blobs is not None
        (blob,) = row.blobs
        data = reader.read(file=blob.file, offset=blob.offset, length=blob.length, place=0)
        assert data == images[number] == blob.data
    for row, place in ((20, 0), (3, 1)):
        with pytest.raises(Refused) as caught:
            reader.read(file=source.parts[0].path, offset=row, length=-1, place=place)
        assert caught.value.reason == "unreadable_image"


def test_batches_are_bounded(tmp_path: Path) -> None:
    """100 rows of 1 MB, each a page, in one row group: never all of them at once."""
    table = pa.table({"image": [bytes(1 << 20)] * 100, "caption": ["a"] * 100})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=100, write_batch_size=1, use_dictionary=False)
    del table
    source = gather({"toy": SourceParams(kind="parquet", path=str(path))}).sources[0]
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in read_part(source, source.parts[0])]
    assert len(held) == 100
    assert max(held) < 80 << 20


def test_numbers_that_are_none_are_ignored_where_nothing_needs_them(tmp_path: Path) -> None:
    table = pa.table(
        {"image": [b"x"], "caption": ["a"], "width": [float("nan")], "id": [float("inf")]}
    )
    (refusal,) = _read(_source(tmp_path, table))
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "non_finite"
    (row,) = _read(_source(tmp_path, table.drop_columns(["id"])))
    assert isinstance(row, RawRow)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"caption": [None], "image": [b"x"]}, "malformed_row"),
        ({"caption": [float("nan")], "image": [b"x"]}, "non_finite"),
        ({"question": ["a"], "answer": [None], "image": [b"x"]}, "malformed_row"),
        ({"messages": ["[1"], "image": [b"x"]}, "malformed_json"),
        ({"messages": ["[" * 100_000], "image": [b"x"]}, "malformed_json"),
        ({"messages": ["{}"], "image": [b"x"]}, "malformed_row"),
        ({"messages": [7], "image": [b"x"]}, "malformed_row"),
        ({"texts": [[]], "image": [b"x"]}, "malformed_row"),
        ({"texts": [["a"]], "image": [b"x"]}, "malformed_row"),
        ({"caption": ["a"], "image": [3]}, "missing_image"),
        ({"caption": ["a"], "images": [[None]]}, "missing_image"),
        ({"caption": ["a"], "image": pa.array([{"bytes": None, "path": ""}], IMAGE)}, "missing"),
        ({"caption": ["<image>"], "image": [b"x"]}, "placeholder_mismatch"),
        ({"question": ["<image><image>"], "answer": ["b"], "image": [b"x"]}, "placeholder"),
    ],
)
def test_rows_are_refused_alone(tmp_path: Path, columns: dict[str, Any], reason: str) -> None:
    (row,) = _read(_source(tmp_path, pa.table(columns)))
    if isinstance(row, RawRow):
        with pytest.raises(Refused) as caught:
            parse(row.value)
        found = caught.value.reason
    else:
        found = row.reason
    assert found.startswith(reason)
    assert found in REASONS


@pytest.mark.parametrize(
    ("table", "params", "message"),
    [
        (pa.table({"a": [1]}), {}, "No column holds text"),
        (pa.table({"caption": ["a"]}), {"columns": {"image": "img"}}, "no column 'img'"),
        (
            pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["caption", "caption"]),
            {},
            "more than once",
        ),
    ],
)
def test_a_table_without_its_columns_is_refused(
    tmp_path: Path, table: pa.Table, params: dict[str, Any], message: str
) -> None:
    (refusal,) = _read(_source(tmp_path, table, **params))
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "missing_column"
    assert message in refusal.detail
    assert refusal.label == "train-00000-of-00001.parquet"


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    table = pa.table({"image": [bytes(1000)] * 50, "caption": [str(n) for n in range(50)]})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, use_dictionary=False)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[10:200] = bytes(190)
    for content in (b"", b"PAR1", whole[:-10], whole[: len(whole) // 2], bytes(damaged)):
        path.write_bytes(content)
        source = gather({"toy": SourceParams(kind="parquet", path=str(path))}).sources[0]
        *_, refusal = _read(source)
        assert isinstance(refusal, Refusal)
        assert refusal.reason == "damaged_part"
    pq.write_table(table[:0], path)
    (refusal,) = _read(gather({"toy": SourceParams(kind="parquet", path=str(path))}).sources[0])
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "empty_part"


@settings(max_examples=60, deadline=None)
@example(start=1393, noise=b"\x85`\x8e")  # a histogram that ended the process
@given(start=st.integers(0, 2000), noise=st.binary(min_size=1, max_size=30))
def test_no_noise_in_a_file_raises(tmp_path_factory, start: int, noise: bytes) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    table = pa.table(
        {
            "image": pa.array([{"bytes": b"x" * 9, "path": "a.png"}] * 5, IMAGE),
            "texts": [[{"user": "a", "assistant": "b"}]] * 5,
        }
    )
    source = _source(folder, table, rows_per_group=2)
    path = folder / source.parts[0].path
    content = bytearray(path.read_bytes())
    start = min(start, len(content) - 1)
    content[start : start + len(noise)] = noise
    path.write_bytes(bytes(content))
    for row in _read(source):
        if isinstance(row, Refusal):
            assert row.reason in REASONS


def test_a_number_as_an_answer_is_text() -> None:
    for answer, text in ((0, "0"), (2.5, "2.5"), ([7, 8], "7")):
        value = make_value({"question": "How many?", "answer": answer}, images=[])
        assert [turn["content"] for turn in value["messages"]] == ["How many?", text]
