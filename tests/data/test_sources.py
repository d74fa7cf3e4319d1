"""Finding sources and reading their rows."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from diptych.core.errors import ConfigError, DataError
from diptych.data import starter
from diptych.data.sources import RawRow, Refusal, SourceParams, gather, read_source

from .conftest import Dataset


def _read(raw_samples) -> list[RawRow | Refusal]:
    return [row for source in raw_samples.sources for row in read_source(source)]


def test_an_array_and_lines_give_the_same_rows(dataset: Dataset) -> None:
    dataset.fill(3)
    array, lines = _read(dataset.write()), _read(dataset.write("rows.jsonl"))
    assert [row.value for row in array] == [row.value for row in lines] == dataset.rows
    assert [row.label for row in array] == ["row-1", "row-2", "row-3"]
    assert [row.label for row in lines] == ["line-1", "line-2", "line-3"]


def test_a_malformed_line_is_refused_alone_and_named(dataset: Dataset) -> None:
    dataset.rows = [
        {"id": 1},
        '{"id": 2',
        {"id": 3},
        '{"id": "\ud83d"}'.encode("ascii", "ignore").decode(),
    ]
    found = _read(dataset.write("rows.jsonl"))
    assert [type(row) for row in found] == [RawRow, Refusal, RawRow, RawRow]
    assert isinstance(found[1], Refusal)
    assert (found[1].label, found[1].reason, found[1].value) == (
        "line-2",
        "malformed_json",
        '{"id": 2',
    )
    assert "Line 2" in found[1].detail


@pytest.mark.parametrize("line", [b"\xff\xfe{}", b"[" * 100_000, b"1" * 5000 + b"x", b"{'id': 1}"])
def test_no_line_can_stop_the_reading(dataset: Dataset, line: bytes) -> None:
    raw_samples = dataset.write("rows.jsonl")
    Path(raw_samples.sources[0].annotations).write_bytes(line + b'\n\n{"id": 2}\n')
    refusal, row = _read(raw_samples)
    assert isinstance(refusal, Refusal)
    assert (row.label, row.value) == ("line-3", {"id": 2})


def test_a_broken_array_with_a_row_a_line_loses_only_the_broken_row(dataset: Dataset) -> None:
    raw_samples = dataset.write()
    Path(raw_samples.sources[0].annotations).write_text(
        '[\n{"id": 1},\n{"id": 2, oops},\n{"id": 3}\n]\n'
    )
    found = _read(raw_samples)
    assert [row.label for row in found] == ["line-2", "line-3", "line-4"]
    assert [isinstance(row, Refusal) for row in found] == [False, True, False]


def test_another_broken_array_is_an_error_that_says_where(dataset: Dataset) -> None:
    dataset.fill(2)
    raw_samples = dataset.write()
    path = Path(raw_samples.sources[0].annotations)
    path.write_text(json.dumps(dataset.rows, indent=2).replace('"gpt"', "gpt"))
    with pytest.raises(DataError, match=r"rows\.json.*line 11 column.*JSONL"):
        _read(raw_samples)


def test_a_missing_path_is_answered_with_the_nearest_name(dataset: Dataset) -> None:
    dataset.write("train.json")
    params = SourceParams(kind="llava", path=str(dataset.folder / "trian.json"))
    with pytest.raises(DataError, match=r"'toy'.*trian\.json.*Did you mean 'train\.json'\?"):
        gather({"toy": params})
    params = SourceParams(
        kind="llava", path=str(dataset.folder / "train.json"), images=str(dataset.folder / "image")
    )
    with pytest.raises(DataError, match=r"image folder.*Did you mean 'images'\?"):
        gather({"toy": params})
    with pytest.raises(DataError, match="not a file"):
        gather({"toy": SourceParams(kind="llava", path=str(dataset.folder))})


def test_images_are_beside_the_annotations_by_default(dataset: Dataset) -> None:
    path = dataset.folder / "rows.json"
    path.write_text("[]")
    source = gather({"toy": SourceParams(kind="llava", path=str(path))}).sources[0]
    assert Path(source.images) == dataset.folder
    assert source.num_image_files == 1


def test_the_digest_notices_a_changed_image(dataset: Dataset) -> None:
    dataset.fill(2)
    before = dataset.write().sources[0]
    assert before == dataset.write().sources[0]
    image = dataset.folder / "images" / "good-0.png"
    os.utime(image, (1, 1))
    touched = dataset.write().sources[0]
    assert touched.listing_sha256 != before.listing_sha256
    assert touched.annotations_sha256 == before.annotations_sha256
    assert touched.num_image_files == 2


@pytest.mark.parametrize("name", ["", "A", "a/b", "../a", "a.b", "-a", "a" * 65])
def test_a_source_name_is_safe_in_file_names(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be named"):
        gather({name: SourceParams()})


def test_there_must_be_a_source() -> None:
    with pytest.raises(ConfigError, match="No source"):
        gather({})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"kind": "llava"}, "needs 'path'"),
        ({"kind": "llava", "path": "a", "split": "train", "heldout_fraction": 0.1}, "exclude"),
        ({"kind": "starter", "split": "train"}, "only 'path'"),
        ({"kind": "llava", "path": "a", "heldout_fraction": 1.0}, "less than 1"),
        ({"kind": "lava", "path": "a"}, "'starter' or 'llava'"),
        ({"paht": "a"}, "not permitted"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(params: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SourceParams(**params)


def test_the_starter_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def build(folder: Path) -> Path:
        built.append(folder)
        return original(folder, num_train=4, num_heldout=2)

    original = starter.build_starter
    monkeypatch.setattr(starter, "build_starter", build)
    folder = tmp_path / "starter"
    folder.mkdir()
    (folder / ".gitkeep").touch()
    first = gather({"digits": SourceParams(path=str(folder))})
    assert gather({"digits": SourceParams(path=str(folder))}) == first
    assert built == [folder]
    assert [(source.name, source.split) for source in first.sources] == [
        ("digits", "train"),
        ("digits", "heldout"),
    ]
    assert [len(list(read_source(source))) for source in first.sources] == [4, 2]


def test_the_starter_is_not_built_over_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError, match=r"notes\.txt"):
        gather({"digits": SourceParams(path=str(tmp_path))})
