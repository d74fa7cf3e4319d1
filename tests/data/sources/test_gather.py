"""Parameters of sources, and what gathering them notices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from diptych.core.errors import ConfigError, DataError
from diptych.data import sources
from diptych.data.sources import SourceParams, gather, read_part, starter
from tests.data.conftest import Dataset


def test_the_public_surface_is_exact() -> None:
    assert sources.__all__ == ["RawRow", "Refusal", "SourceParams", "gather", "read_part"]


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
    params = SourceParams(
        kind="llava",
        path=str(dataset.folder / "train.json"),
        images=str(dataset.folder / "train.json"),
    )
    with pytest.raises(DataError, match="not a folder"):
        gather({"toy": params})


def test_images_are_beside_the_annotations_by_default(dataset: Dataset) -> None:
    path = dataset.folder / "rows.json"
    path.write_text("[]")
    source = gather({"toy": SourceParams(kind="llava", path=str(path))}).sources[0]
    assert Path(source.images) == Path(source.root) == dataset.folder
    assert [part.path for part in source.parts] == ["rows.json"]
    assert source.num_image_files == 1


def test_the_digest_notices_a_changed_image_and_a_changed_row(dataset: Dataset) -> None:
    dataset.fill(2)
    before = dataset.write().sources[0]
    assert before == dataset.write().sources[0]
    assert before.parts[0].stamp.startswith("sha256:")
    image = dataset.folder / "images" / "good-0.png"
    os.utime(image, (1, 1))
    touched = dataset.write().sources[0]
    assert touched.listing_sha256 != before.listing_sha256
    assert touched.parts == before.parts
    assert touched.num_image_files == 2
    dataset.fill(1)
    assert dataset.write().sources[0].parts[0].stamp != before.parts[0].stamp


def test_a_large_file_is_known_by_its_time_and_not_read(dataset: Dataset, monkeypatch) -> None:
    monkeypatch.setattr("diptych.data.sources.files._MAX_HASHED_BYTES", 10)
    dataset.fill(2)
    source = dataset.write().sources[0]
    time = (dataset.folder / "rows.json").stat().st_mtime_ns
    assert source.parts[0].stamp == f"stat:{time}"


def test_a_folder_of_images_that_cannot_be_listed_is_a_clear_error(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> object:
        raise PermissionError(13, "Permission denied")

    dataset.fill(1)
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        dataset.write()


def test_an_image_that_vanishes_while_it_is_listed_is_passed_over(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Vanishing:
        def __init__(self, folder: Path) -> None:
            self._folder = folder

        def __enter__(self):
            return [self.Entry(entry) for entry in real(self._folder)]

        def __exit__(self, *args: object) -> None:
            pass

        class Entry:
            def __init__(self, entry: os.DirEntry[str]) -> None:
                self.name, self._entry = entry.name, entry

            def is_dir(self, *, follow_symlinks: bool) -> bool:
                return self._entry.is_dir(follow_symlinks=follow_symlinks)

            def stat(self, *, follow_symlinks: bool) -> os.stat_result:
                if self.name == "good-0.png":
                    raise FileNotFoundError(2, "No such file")
                return self._entry.stat(follow_symlinks=follow_symlinks)

    real = os.scandir
    dataset.fill(3)
    monkeypatch.setattr(os, "scandir", Vanishing)
    assert dataset.write().sources[0].num_image_files == 2


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
        ({"kind": "llava", "path": []}, "list of paths is empty"),
        ({"kind": "llava", "path": ""}, "a path is empty"),
        ({"kind": "llava", "path": "a", "split": "train", "heldout_fraction": 0.1}, "exclude"),
        ({"kind": "starter", "split": "train"}, "takes no 'split'"),
        ({"kind": "llava", "path": "a", "heldout_fraction": 1.0}, "less than 1"),
        ({"kind": "llava", "path": "a", "repeat": 0}, "greater than 0"),
        ({"kind": "llava", "path": "a", "repeat": float("nan")}, "finite"),
        ({"kind": "llava", "path": "a", "columns": {"image": "b"}}, "takes no 'columns'"),
        ({"kind": "csv", "path": "a", "columns": {"imgae": "b"}}, "Did you mean 'image'"),
        ({"kind": "csv", "path": "a", "prompt": ""}, "at least 1 character"),
        ({"kind": "internvl", "path": ["a", "b"]}, "has one 'path'"),
        ({"kind": "energon", "path": "a", "split": "train"}, "takes no 'split'"),
        ({"kind": "webdataset", "path": "a", "images": "b"}, "takes no 'images'"),
        ({"kind": "lava", "path": "a"}, "'starter', 'llava'"),
        ({"paht": "a"}, "not permitted"),
        ({"kind": "llava", "path": "ftp://host/a"}, "'ftp://' is not read"),
        ({"kind": "llava", "path": "file:///etc/passwd"}, "'file://' is not read"),
        ({"kind": "llava", "path": "simplecache::s3://b/a"}, "chains addresses"),
        ({"kind": "llava", "path": "http://example.com/a"}, "'http://' is not read"),
        ({"kind": "llava", "path": "https://u:p@host/a"}, "no user, password"),
        ({"kind": "llava", "path": "https://host/a?token=x"}, "no user, password"),
        ({"kind": "llava", "path": "a", "images": "s3://key:secret@b/a"}, "no user, password"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        SourceParams(**params)
    assert "secret" not in str(caught.value).partition("[type=")[0]


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
    assert [(source.name, source.split, source.kind) for source in first.sources] == [
        ("digits", "train", "llava"),
        ("digits", "heldout", "llava"),
    ]
    assert [
        len(list(read_part(source, part))) for source in first.sources for part in source.parts
    ] == [4, 2]


def test_the_starter_is_not_built_over_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError, match=r"notes\.txt"):
        gather({"digits": SourceParams(path=str(tmp_path))})
