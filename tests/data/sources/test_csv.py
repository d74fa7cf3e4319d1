"""Reading tables of text."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.data.reasons import REASONS, Refused
from diptych.data.sources import RawRow, Refusal, SourceParams, gather, read_part
from diptych.data.sources.rows import parse


def _read(
    folder: Path, content: bytes, *, name: str = "rows.csv", **params: Any
) -> list[RawRow | Refusal]:
    (folder / name).write_bytes(content)
    params = {"kind": "csv", "path": str(folder / name)} | params
    source = gather({"toy": SourceParams(**params)}).sources[0]
    return [row for part in source.parts for row in read_part(source, part)]


def _turns(row: RawRow | Refusal) -> list[str]:
    assert isinstance(row, RawRow)
    return [message.text for message in parse(row.value).messages]


def test_image_and_caption(tmp_path: Path) -> None:
    content = '\ufeffid,image,caption\r\na,x.png,"a ""cat"",\nand é"\r\nb,,words\r\n'.encode()
    first, second = _read(tmp_path, content, prompt="What is it?")
    assert _turns(first) == ["<image>\nWhat is it?", 'a "cat",\nand é']
    assert isinstance(first, RawRow)
    assert (first.label, first.blobs) == ("row-1", None)
    assert parse(first.value).image_paths == ("x.png",)
    assert parse(first.value).id == "a"
    assert isinstance(second, Refusal)
    assert (second.reason, second.detail) == (
        "missing_image",
        "The row has a caption, but no image",
    )


def test_question_and_answer_by_tabs_and_other_names(tmp_path: Path) -> None:
    (row,) = _read(
        tmp_path,
        b"file\tq\ta\nx.png\tWhat?\tA cat.\n",
        name="rows.tsv",
        columns={"image": "file", "question": "q", "answer": "a"},
    )
    assert _turns(row) == ["<image>\nWhat?", "A cat."]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty_part"),
        (b"image,caption\n", "empty_part"),
        (b"image,words\nx.png,a\n", "missing_column"),
        (b"image,caption,caption\nx.png,a,b\n", "missing_column"),
        ('image,caption\nx.png,"é"\n'.encode("utf-16"), "missing_column"),
        (b"image,caption\nx.png\n", "malformed_row"),
        (b"image,caption\nx.png,a,b\n", "malformed_row"),
        (b"image,caption\nx.png,\xff\xfe\n", "malformed_row"),
        (b"image,caption\nx\0.png,a\n", "malformed_row"),
        (b"image,caption\nx.png,\n", "empty_answer"),
        (b"image,caption\nhttp://host/x.png,a\n", "path_escapes"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (row,) = _read(tmp_path, content)
    if isinstance(row, RawRow):
        with pytest.raises(Refused) as caught:
            parse(row.value)
        assert caught.value.reason == reason
    else:
        assert row.reason == reason


def test_long_fields_and_lines_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("csv", "lines"):
        monkeypatch.setattr(import_module(f"diptych.data.sources.{module}"), "MAX_ROW_BYTES", 64)
    header, good = b"image,caption\n", b"x.png,good\n"
    quoted = b'x.png,"' + b"word\n" * 30 + b'"\n'
    found = _read(tmp_path, header + quoted + good)
    assert isinstance(found[0], Refusal)
    assert found[0].reason == "malformed_row"
    assert all(isinstance(row, Refusal) for row in found)  # nobody knows where the next row is
    one, refusal = _read(tmp_path, header + good + b"y" * 100 + b"\n" + good)
    assert _turns(one)[1] == "good"
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "row_too_long"


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=200), header=st.booleans())
def test_arbitrary_bytes_raise_nothing(tmp_path_factory, content: bytes, header: bool) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    for row in _read(folder, (b"image,caption\n" if header else b"") + content):
        if isinstance(row, Refusal):
            assert row.reason in REASONS
            continue
        with suppress(Refused):
            parse(row.value)
