"""Reading annotations in JSON: arrays and lines, whole, cut, streamed, and damaged."""

from __future__ import annotations

import base64
import io
import json
import resource
import tracemalloc
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.core.records import RawSamples, RawSource
from diptych.data.reasons import REASONS, Refused
from diptych.data.sources import RawRow, Refusal, SourceParams, gather, read_part
from diptych.data.sources.blobs import BlobReader
from diptych.data.sources.elements import read_elements
from diptych.data.sources.lines import read_lines
from diptych.data.sources.rows import parse
from tests.data.conftest import Dataset

_LIMITED = ("lines", "elements", "llava", "gather")


def _read(raw_samples: RawSamples) -> list[RawRow | Refusal]:
    return [
        row
        for source in raw_samples.sources
        for part in source.parts
        for row in read_part(source, part)
    ]


def _written(folder: Path, content: bytes, *, name: str = "rows.jsonl") -> RawSource:
    (folder / name).write_bytes(content)
    return gather({"toy": SourceParams(kind="llava", path=str(folder / name))}).sources[0]


def _read_bytes(folder: Path, content: bytes, **options: Any) -> list[RawRow | Refusal]:
    source = _written(folder, content, **options)
    return [row for part in source.parts for row in read_part(source, part)]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let rows be 64 bytes long instead of 64 MB."""
    for module in _LIMITED:
        monkeypatch.setattr(import_module(f"diptych.data.sources.{module}"), "MAX_ROW_BYTES", 64)
    return 64


def test_an_array_and_lines_give_the_same_rows(dataset: Dataset) -> None:
    dataset.fill(3)
    array, lines = _read(dataset.write()), _read(dataset.write("rows.jsonl"))
    assert [row.value for row in array] == [row.value for row in lines] == dataset.rows
    assert [row.label for row in array] == ["row-1", "row-2", "row-3"]
    assert [row.label for row in lines] == ["line-1", "line-2", "line-3"]
    assert all(row.blobs is None for row in array + lines)


def test_several_files_have_labels_of_their_own(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text('[{"x": 1}, {"x": 2}]')
    found = _read(gather({"toy": SourceParams(kind="llava", path=str(tmp_path))}))
    assert [row.label for row in found] == [
        "a.json:row-1",
        "a.json:row-2",
        "b.json:row-1",
        "b.json:row-2",
    ]


def test_a_malformed_line_is_refused_alone_and_named(dataset: Dataset) -> None:
    dataset.rows = [{"id": 1}, '{"id": 2', {"id": 3}, '{"id": "\\ud83d"}']
    found = _read(dataset.write("rows.jsonl"))
    assert [type(row) for row in found] == [RawRow, Refusal, RawRow, RawRow]
    assert isinstance(found[1], Refusal)
    assert (found[1].label, found[1].reason, found[1].value) == (
        "line-2",
        "malformed_json",
        '{"id": 2',
    )
    assert "Line-2" in found[1].detail


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 5000 + b"x",
        b"1" * 5000,
        b"{'id': 1}",
        b"\0\0\0",
        '{"id": 1}'.encode("utf-16"),
    ],
)
def test_no_line_can_stop_the_reading(tmp_path: Path, line: bytes) -> None:
    *refusals, row = _read_bytes(tmp_path, line + b'\n\n{"id": 2}\n')
    assert refusals
    assert all(isinstance(refusal, Refusal) for refusal in refusals)
    assert isinstance(row, RawRow)
    assert row.value == {"id": 2}


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_a_byte_order_mark_and_windows_line_ends_are_no_fault(tmp_path: Path, name: str) -> None:
    content = b'{"id": 1}\r\n{"id": 2}\r\n'
    if name == "rows.json":
        content = b'[{"id": 1},\r\n{"id": 2}]'
    found = _read_bytes(tmp_path, b"\xef\xbb\xbf" + content, name=name)
    assert [row.value for row in found if isinstance(row, RawRow)] == [{"id": 1}, {"id": 2}]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"[]", b" [ ] "])
def test_a_file_without_rows_is_refused(tmp_path: Path, content: bytes) -> None:
    (refusal,) = _read_bytes(tmp_path, content, name="rows.json")
    assert isinstance(refusal, Refusal)
    assert (refusal.label, refusal.reason) == ("rows.json", "empty_part")


def test_a_broken_array_with_a_row_a_line_loses_only_the_broken_row(tmp_path: Path) -> None:
    found = _read_bytes(
        tmp_path, b'[\n{"id": 1},\n{"id": 2, oops},\n{"id": 3}\n]\n', name="rows.json"
    )
    assert [row.label for row in found] == ["line-2", "line-3", "line-4"]
    assert [isinstance(row, Refusal) for row in found] == [False, True, False]


def test_another_broken_array_is_refused_and_says_where(dataset: Dataset) -> None:
    dataset.fill(2)
    raw_samples = dataset.write()
    text = json.dumps(dataset.rows, indent=2).replace('"gpt"', "gpt")
    (dataset.folder / "rows.json").write_text(text)
    (refusal,) = _read(raw_samples)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "damaged_part"
    assert "line 11 column" in refusal.detail
    assert "JSONL" in refusal.detail


def test_an_array_on_one_line_that_is_cut_off_is_used_up_to_there(tmp_path: Path) -> None:
    first, second, refusal = _read_bytes(
        tmp_path, b'[{"id": 1}, {"id": 2}, {"id": 3', name="rows.json"
    )
    assert isinstance(first, RawRow)
    assert isinstance(second, RawRow)
    assert [first.value, second.value] == [{"id": 1}, {"id": 2}]
    assert isinstance(refusal, Refusal)
    assert (refusal.label, refusal.reason) == ("rows.json", "damaged_part")
    assert "Rows before the damage are used" in refusal.detail


def test_a_long_file_of_lines_is_cut_and_every_line_is_read_once(
    tmp_path: Path, limit: int
) -> None:
    rows = [{"n": number, "x": "y" * (number % 40)} for number in range(200)]
    lines = [json.dumps(row).encode() for row in rows]
    source = _written(tmp_path, b"\n".join(lines))
    assert len(source.parts) > 50
    assert {part.path for part in source.parts} == {"rows.jsonl"}
    found = [row for part in source.parts for row in read_part(source, part)]
    assert [row.value for row in found if isinstance(row, RawRow)] == rows
    labels = [row.label for row in found]
    assert len(set(labels)) == len(rows)
    assert labels[:2] == ["byte-0", f"byte-{len(lines[0]) + 1}"]


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=30),
    ends=st.booleans(),
    size=st.integers(1, 100),
)
def test_however_a_file_is_cut_the_lines_are_the_same(lengths, ends, size) -> None:
    content = b"\n".join(b"x" * length for length in lengths) + (b"\n" if ends else b"")
    whole = [(line.offset, line.text) for line in read_lines(io.BytesIO(content))]
    assert [text for _, text in whole] == content.splitlines(keepends=True)
    cut = [
        (line.offset, line.text)
        for start in range(0, max(1, len(content)), size)
        for line in read_lines(io.BytesIO(content), start=start, end=start + size)
    ]
    assert cut == whole


def test_a_line_too_long_is_passed_over(tmp_path: Path, limit: int) -> None:
    content = b'{"id": 1}\n{"id": "' + b"x" * 1000 + b'"}\n{"id": 3}\n'
    one, refusal, three = _read_bytes(tmp_path, content)
    assert (one.value, three.value) == ({"id": 1}, {"id": 3})
    assert isinstance(refusal, Refusal)
    assert (refusal.label, refusal.reason) == ("byte-10", "row_too_long")


def test_a_large_array_is_streamed(tmp_path: Path, limit: int) -> None:
    rows = [{"id": number, "width": 1.5, "text": "é"} for number in range(20)]
    content = json.dumps(rows).encode()
    found = _read_bytes(tmp_path, b"\xef\xbb\xbf" + content, name="rows.json")
    assert [row.value for row in found if isinstance(row, RawRow)] == rows
    assert [row.label for row in found] == [f"row-{number}" for number in range(1, 21)]


@pytest.mark.parametrize(
    ("tail", "reasons"),
    [
        (b', {"id": 3, oops}, {"id": 4}]', ["malformed_json", None]),
        (b', {"id": 3, "a": [1, 2}}, {"id": 4}]', ["malformed_json", None]),
        (b', , {"id": 4}]', ["malformed_json", None]),
        (b', "\xff\xfe", {"id": 4}]', ["malformed_json", None]),
        (b', {"id": "\\"]},"}, {"id": 4},\n]\n', [None, None]),
        (b', {"id": 3', ["damaged_part"]),
        (b', {"id": "3}]', ["damaged_part"]),
        (b"]]]]", ["damaged_part"]),
        (b'] {"id": 3}', ["damaged_part"]),
    ],
)
def test_a_damaged_large_array_loses_only_what_is_damaged(
    tmp_path: Path, limit: int, tail: bytes, reasons: list[str | None]
) -> None:
    content = b'[{"id": 1}, {"id": 2}' + b" " * 64 + tail
    one, two, *others = _read_bytes(tmp_path, content, name="rows.json")
    assert [one.label, two.label] == ["row-1", "row-2"]
    assert isinstance(one, RawRow)
    assert one.value == {"id": 1}
    found = [row.reason if isinstance(row, Refusal) else None for row in others]
    assert found[-len(reasons) :] == reasons


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.dictionaries(st.text(max_size=3), st.text(max_size=9) | st.lists(st.integers())),
        max_size=8,
    ),
    chunk=st.integers(1, 40),
    indent=st.sampled_from([None, 1]),
)
def test_an_array_is_split_as_json_reads_it(rows, chunk: int, indent: int | None) -> None:
    content = json.dumps(rows, indent=indent, ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diptych.data.sources.elements._CHUNK_BYTES", chunk)
        found = list(read_elements(io.BytesIO(content)))
    assert [json.loads(element.text or b"") for element in found] == rows
    for element in found:
        assert element.text is not None
        assert content[element.offset :].startswith(element.text)


def test_deep_nesting_in_a_large_array_crashes_nothing(tmp_path: Path, limit: int) -> None:
    content = b'[{"id": 1}, {"conversations": ' + b"[" * 50_000 + b"]" * 50_000 + b"}]"
    for row in _read_bytes(tmp_path, content, name="rows.json"):
        if isinstance(row, RawRow) and row.value != {"id": 1}:
            with pytest.raises(Refused):
                parse(row.value)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_huge_row_is_refused_in_bounded_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.write(b'{"id": "' if name == "rows.jsonl" else b'[{"id": "')
        for _ in range(400):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n{"id": 2}\n' if name == "rows.jsonl" else b'"}, {"id": 2}]')
    source = gather({"toy": SourceParams(kind="llava", path=str(path))}).sources[0]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    found = [row for part in source.parts for row in read_part(source, part)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    refusals = [row for row in found if isinstance(row, Refusal)]
    assert [refusal.reason for refusal in refusals] == ["row_too_long"]
    assert peak < 150 << 20
    assert grown_kib < 300 << 10
    assert [row.value for row in found if isinstance(row, RawRow)] == [{"id": 2}]


def test_a_file_that_grows_or_vanishes_is_refused(tmp_path: Path) -> None:
    source = _written(tmp_path, b'{"id": 1}\n{"id": 2}\n')
    path = tmp_path / "rows.jsonl"
    rows = read_part(source, source.parts[0])
    next(rows)
    with path.open("ab") as file:
        file.write(b'{"id": 3}\n')
    *_, refusal = rows
    assert isinstance(refusal, Refusal)
    assert (refusal.label, refusal.reason) == ("rows.jsonl", "damaged_part")
    assert "changed while it was read" in refusal.detail
    path.unlink()
    (refusal,) = read_part(source, source.parts[0])
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "damaged_part"
    assert "There is no" in refusal.detail


def test_a_cut_file_that_changed_since_it_was_cut_is_refused(tmp_path: Path, limit: int) -> None:
    source = _written(tmp_path, b'{"id": 1}\n' * 20)
    (tmp_path / "rows.jsonl").write_bytes(b'{"id": 1}\n' * 30)
    for part in source.parts:
        (refusal,) = read_part(source, part)
        assert isinstance(refusal, Refusal)
        assert "has changed" in refusal.detail


def test_a_file_that_may_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    source = _written(tmp_path, b'{"id": 1}\n')
    monkeypatch.setattr(Path, "open", refuse)
    (refusal,) = read_part(source, source.parts[0])
    assert isinstance(refusal, Refusal)
    assert (refusal.label, refusal.reason) == ("rows.jsonl", "damaged_part")
    assert "Permission denied" in refusal.detail


def _inline_row(*images: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    return {
        "messages": [
            {"role": "user", "content": [*parts, {"type": "text", "text": "Same?"}]},
            {"role": "assistant", "content": "Yes."},
        ]
    }


def _data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def test_images_written_into_a_line_are_found_again(tmp_path: Path) -> None:
    (tmp_path / "c.png").write_bytes(b"three")
    rows = [{"x": 1}, _inline_row(_data_url(b"one"), "c.png", _data_url(b"two"))]
    content = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    source = _written(tmp_path, content)
    _, row = read_part(source, source.parts[0])
    assert isinstance(row, RawRow)
    assert row.blobs is not None
    assert [blob.data for blob in row.blobs] == [b"one", None, b"two"]
    assert parse(row.value).messages[0].text == "<image><image><image>Same?"
    reader = BlobReader(source)
    found = [
        reader.read(file=blob.file, offset=blob.offset, length=blob.length, place=place)
        for place, blob in enumerate(row.blobs)
    ]
    assert found == [b"one", b"three", b"two"]


def test_an_image_written_into_a_line_must_be_base64(tmp_path: Path) -> None:
    for image in ("data:image/png;base64,%%%", "data:image/png,abc", "data:"):
        (refusal,) = _read_bytes(tmp_path, json.dumps(_inline_row(image)).encode())
        assert isinstance(refusal, Refusal)
        assert refusal.reason == "unreadable_image"


def test_an_image_written_into_an_array_is_refused(tmp_path: Path) -> None:
    content = json.dumps([_inline_row(_data_url(b"one")), {"id": 2}]).encode()
    refusal, row = _read_bytes(tmp_path, content, name="rows.json")
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "unreadable_image"
    assert "JSONL" in refusal.detail
    assert isinstance(row, RawRow)


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=400), name=st.sampled_from(["rows.json", "rows.jsonl"]))
def test_arbitrary_bytes_raise_nothing(tmp_path_factory, content: bytes, name: str) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    for row in _read_bytes(folder, content, name=name):
        _check(row)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["id", "image", "images", "messages", "role", "content", "type"])
            | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(_JSON, max_size=4), cut=st.integers(0, 50), streamed=st.booleans())
def test_arbitrary_json_raises_nothing(tmp_path_factory, rows, cut: int, streamed: bool) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    content = json.dumps(rows).encode()
    with pytest.MonkeyPatch.context() as patch:
        if streamed:
            patch.setattr("diptych.data.sources.llava.MAX_ROW_BYTES", 8)
        for row in _read_bytes(folder, content[: len(content) - cut], name="rows.json"):
            _check(row)


def _check(row: RawRow | Refusal) -> None:
    if isinstance(row, Refusal):
        assert row.reason in REASONS
        return
    with suppress(Refused):
        parse(row.value)
