"""Which files a source's paths name."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.core.errors import ConfigError, DataError
from diptych.core.records import RawSource
from diptych.data.sources import SourceParams, gather
from diptych.data.sources.files import _glob_pattern


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    for name in ("a-000.tar", "a-001.tar", "b.tar", "more/c.tar", ".hidden/d.tar", "notes.txt"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "data"


def _gathered(*paths: str, kind: str = "webdataset") -> RawSource:
    path = paths[0] if len(paths) == 1 else list(paths)
    return gather({"toy": SourceParams(kind=kind, path=path)}).sources[0]


def _parts(source: RawSource) -> list[str]:
    return [part.path for part in source.parts]


def test_folder_glob_brace_and_list(tars: Path) -> None:
    assert _parts(_gathered(str(tars))) == ["a-000.tar", "a-001.tar", "b.tar", "more/c.tar"]
    assert _parts(_gathered(f"{tars}/a-*.tar")) == ["a-000.tar", "a-001.tar"]
    assert _parts(_gathered(f"{tars}/**/*.tar"))[-1] == "more/c.tar"
    assert _parts(_gathered(f"{tars}/a-{{000..001}}.tar")) == ["a-000.tar", "a-001.tar"]
    listed = _gathered(f"{tars}/more/c.tar", f"{tars}/a-*.tar", f"{tars}/a-000.tar")
    assert _parts(listed) == ["more/c.tar", "a-000.tar", "a-001.tar"]
    assert Path(listed.root) == tars


def test_relative_paths_stay_relative(tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tars.parent)
    assert _gathered("data/b.tar").root == "data"
    assert _gathered("data").root == "data"
    monkeypatch.chdir(tars)
    assert (_gathered("b.tar").root, _parts(_gathered("b.tar"))) == (".", ["b.tar"])
    assert (_gathered("../data/b.tar").root, _parts(_gathered("../data/b.tar"))) == (
        "../data",
        ["b.tar"],
    )


def test_a_name_with_pattern_signs_is_that_file(tmp_path: Path) -> None:
    for name in ("a[1].tar", "b{2}.tar"):
        (tmp_path / name).touch()
        assert _parts(_gathered(f"{tmp_path}/{name}")) == [name]


def test_paths_that_name_nothing_say_so(tars: Path) -> None:
    for pattern, message in [
        (f"{tars}/z-*.tar", "names no file"),
        (f"{tars}/a-{{000..002}}.tar", r"no 'a-002\.tar'.*Did you mean"),
    ]:
        with pytest.raises(DataError, match=message):
            _gathered(pattern)
    with pytest.raises(DataError, match=r"names no file.*\.parquet"):
        _gathered(str(tars), kind="parquet")


def test_broken_or_endless_brace_patterns_are_refused(tars: Path, monkeypatch) -> None:
    with pytest.raises(ConfigError, match="brace pattern"):
        _gathered(f"{tars}/a-{{000..00")
    monkeypatch.setattr("diptych.data.sources.files._MAX_PATTERN_FILES", 100)
    with pytest.raises(ConfigError, match="more than 100"):
        _gathered(f"{tars}/a-{{000..999}}.tar")


def test_local_and_remote_do_not_mix(tars: Path) -> None:
    with pytest.raises(ConfigError, match="partly URLs"):
        _gathered(f"{tars}/b.tar", "s3://bucket/c.tar")


def test_links_among_the_files_are_followed(tmp_path: Path) -> None:
    """A Hugging Face cache names every file by a link out of its folder."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "0f3c").write_text('{"id": 1}\n')
    (snapshot / "train.jsonl").symlink_to("../../blobs/0f3c")
    source = _gathered(str(snapshot), kind="llava")
    assert _parts(source) == ["train.jsonl"]
    assert source.parts[0].num_bytes == 10


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("a-*.tar", "a-1.tar", True),
        ("a-*.tar", "a-1/b.tar", False),
        ("**/*.tar", "x/y/b.tar", True),
        ("**/*.tar", "b.tar", True),
        ("a-?.tar", "a-12.tar", False),
        ("a-[0-3].tar", "a-2.tar", True),
        ("a-[!0-3].tar", "a-2.tar", False),
        ("a.tar", "aXtar", False),
    ],
)
def test_globs_of_urls(pattern: str, name: str, matches: bool) -> None:
    assert bool(_glob_pattern(pattern).match(name)) is matches
