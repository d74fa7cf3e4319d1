"""Catalog entries: what is saved is loaded, whole or not at all, and digests notice changes."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path

import pyarrow as pa
import pytest
from kedro.io import DatasetError

from diptych.core.errors import ConfigError, FormatError
from diptych.core.hashing import xxh3_file
from diptych.core.records import Buckets, Run
from diptych.datasets import (
    Artifact,
    FigureDataset,
    FolderDataset,
    PageDataset,
    RecordDataset,
    TableDataset,
)

BUCKETS = Buckets(areas_px=(100, 200), aspects=(1.5,))
TABLE = pa.table({"key": ["a", "b", "c"], "sizes": [[1, 2], [], None], "loss": [0.5, None, 2.0]})


def buckets_dataset(folder: Path) -> RecordDataset:
    return RecordDataset(filepath=str(folder / "buckets.json"), record="Buckets")


def run_dataset(folder: Path) -> RecordDataset:
    return RecordDataset(
        filepath=str(folder / "run.json"), record="Run", paths=["folder", "checkpoint"]
    )


def test_a_record_comes_back_equal_and_readable(tmp_path: Path):
    dataset = buckets_dataset(tmp_path / "new")
    assert not dataset.exists()
    dataset.save(BUCKETS)
    assert dataset.exists()
    assert dataset.load() == BUCKETS
    # Plain JSON for whoever reads it without us.
    assert json.loads((tmp_path / "new" / "buckets.json").read_text()) == {
        "areas_px": [100, 200],
        "aspects": [1.5],
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"is not a Buckets: the file: Invalid JSON.*Delete the file and run again"),
        ('{"areas_px": [1]}', r"is not a Buckets: aspects: Field required \(1 problems\)"),
        ('{"areas_px": ["x"], "aspects": [], "y": 1}', r"areas_px\.0: .*\(2 problems\)"),
    ],
)
def test_a_damaged_record_says_where_and_what_to_do(tmp_path: Path, text: str, message: str):
    (tmp_path / "buckets.json").write_text(text)
    with pytest.raises(DatasetError, match=message) as error:
        buckets_dataset(tmp_path).load()
    assert isinstance(error.value.__cause__, FormatError)


def test_an_entry_that_was_not_made_says_how_to_make_it(tmp_path: Path):
    for dataset in (
        buckets_dataset(tmp_path),
        TableDataset(filepath=str(tmp_path / "table.parquet")),
        FolderDataset(filepath=str(tmp_path / "folder")),
        FigureDataset(filepath=str(tmp_path / "figure.json")),
        PageDataset(filepath=str(tmp_path / "page.html")),
    ):
        with pytest.raises(DatasetError, match=r"has not been made yet.*`kedro run`"):
            dataset.load()


def test_a_record_of_another_kind_is_not_saved(tmp_path: Path):
    with pytest.raises(DatasetError, match="Run expected, got Buckets"):
        run_dataset(tmp_path).save(BUCKETS)
    assert not (tmp_path / "run.json").exists()


def test_an_unknown_record_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown record 'Bucket'. Did you mean 'Buckets'\?"):
        RecordDataset(filepath="x.json", record="Bucket")


def test_a_run_without_its_checkpoint_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    dataset = run_dataset(tmp_path)
    (tmp_path / "runs" / "step-2").mkdir(parents=True)
    run = Run(
        run_id="a",
        identity_sha256="a",
        folder="runs",
        checkpoint="runs/step-2",
        num_steps=2,
        final_loss=1.0,
        final_heldout_loss=None,
        train_s=1.0,
        num_attempts=1,
        world_size=1,
        num_masked=0,
        num_skipped=0,
        source_sha256="a",
    )
    dataset.save(run)
    assert dataset.exists()
    (tmp_path / "runs" / "step-2").rmdir()
    assert not dataset.exists()


def test_a_table_comes_back_equal(tmp_path: Path):
    dataset = TableDataset(filepath=str(tmp_path / "table.parquet"))
    dataset.save(TABLE)
    assert dataset.load().equals(TABLE)


def test_a_figure_comes_back_equal(tmp_path: Path):
    import plotly.graph_objects as go

    dataset = FigureDataset(filepath=str(tmp_path / "figure.json"))
    figure = go.Figure(go.Scatter(x=[1, 2], y=[3, 1]))
    dataset.save(figure)
    assert dataset.load() == figure
    assert dataset.preview()["data"][0]["type"] == "scatter"


@pytest.mark.parametrize(
    ("dataset", "first", "second"),
    [
        (buckets_dataset(Path()), BUCKETS, Buckets(areas_px=(), aspects=())),
        (TableDataset(filepath="table.parquet"), TABLE, TABLE.slice(1)),
        (PageDataset(filepath="page.html"), "<p>one", "<p>two"),
    ],
)
def test_a_save_replaces_the_file_and_never_writes_into_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dataset: Artifact,
    first: object,
    second: object,
):
    monkeypatch.chdir(tmp_path)
    dataset.save(first)
    # As DVC leaves outputs with hard links: the cache shares the bytes, and they are read-only.
    os.link(dataset.path, "cached")
    Path("cached").chmod(0o444)
    before = Path("cached").read_bytes()
    dataset.save(second)
    assert Path("cached").read_bytes() == before
    assert dataset.path.read_bytes() != before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["cached", dataset.path.name])


def make_folder(root: Path) -> Path:
    (root / "made" / "deep").mkdir(parents=True)
    (root / "made" / "deep" / "big.tar").write_text("aaaa")
    (root / "made" / "sums.json").write_text("{}")
    (root / "made" / "card.md").write_text("card")
    return root / "made"


@pytest.mark.parametrize(
    ("name", "text", "noticed"),
    [
        ("deep/big.tar", "bbbb", False),
        ("deep/big.tar", "bbbbb", True),
        ("deep/more.tar", "", True),
        ("sums.json", "[]", True),
        ("card.md", "another card", False),
        ("deep/half.tar.partial", "", False),
    ],
)
def test_a_folders_digest_notices_what_it_is_told_to(
    tmp_path: Path, name: str, text: str, noticed: bool
):
    folder = make_folder(tmp_path)
    dataset = FolderDataset(filepath=str(folder), hashed=["*.json"], ignored=["card.md"])
    before = dataset.digest(hash_file=xxh3_file)
    (folder / name).write_text(text)
    assert (dataset.digest(hash_file=xxh3_file) != before) is noticed


def test_without_a_choice_every_byte_of_a_folder_counts(tmp_path: Path):
    folder = make_folder(tmp_path)
    dataset = FolderDataset(filepath=str(folder))
    before = dataset.digest(hash_file=xxh3_file)
    (folder / "deep" / "big.tar").write_text("bbbb")
    assert dataset.digest(hash_file=xxh3_file) != before


def test_a_folder_is_given_relative_to_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    dataset = FolderDataset(filepath=str(make_folder(tmp_path)))
    assert dataset.load() == Path("made")
    dataset.save(Path("made"))


def test_another_folder_than_the_catalogs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    dataset = FolderDataset(filepath=str(make_folder(tmp_path)))
    with pytest.raises(DatasetError, match="The node filled 'other', the catalog says 'made'"):
        dataset.save(Path("other"))


def test_an_empty_folder_is_not_made(tmp_path: Path):
    dataset = FolderDataset(filepath=str(tmp_path))
    assert not dataset.exists()
    with pytest.raises(DatasetError, match="missing or empty"):
        dataset.save(tmp_path)


def test_previews_are_plain_values_that_kedro_viz_knows(tmp_path: Path):
    record = buckets_dataset(tmp_path)
    record.save(Buckets(areas_px=tuple(range(30)), aspects=()))
    assert json.loads(record.preview())["areas_px"][-2:] == [19, "... and 10 more"]
    table = TableDataset(filepath=str(tmp_path / "table.parquet"))
    table.save(TABLE)
    assert table.preview(nrows=2) == {
        "index": [0, 1],
        "columns": ["key", "sizes", "loss"],
        "data": [["a", "[1, 2]", 0.5], ["b", "[]", None]],
    }
    table.save(TABLE.slice(0, 0))
    assert table.preview()["data"] == []
    folder = FolderDataset(filepath=str(make_folder(tmp_path)))
    assert folder.preview()["data"][1] == ["deep/big.tar", 4]
    page = PageDataset(filepath=str(tmp_path / "page.html"))
    page.save("<p>é")
    assert page.preview() == "<p>é"
    # kedro-viz chooses the view by the name of the annotation.
    names = [inspect.signature(each.preview).return_annotation for each in (record, table, page)]
    assert names == ["JSONPreview", "TablePreview", "HTMLPreview"]
