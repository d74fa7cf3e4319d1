"""Folders that `energon prepare` (7.4) made; the YAML below is what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.core.errors import DataError
from diptych.data.sources import SourceParams, gather

DATASET = """\
sample_type:
  __module__: megatron.energon
  __class__: CaptioningSample
field_map:
  image: jpg
  caption: txt
"""
SPLIT = """\
split_parts:
  train:
  - shards/shard_{000..001}.tar
  val:
  - shards/shard_002.tar
  test:
  - shards/shard_003.tar
exclude: []
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / ".nv-meta").mkdir()
    (tmp_path / "shards").mkdir()
    for number in range(4):
        (tmp_path / "shards" / f"shard_{number:03d}.tar").touch()
    _write(tmp_path)
    return tmp_path


def _write(folder: Path, *, split: str = SPLIT, dataset: str = DATASET) -> None:
    (folder / ".nv-meta" / "split.yaml").write_text(split)
    (folder / ".nv-meta" / "dataset.yaml").write_text(dataset)


def _gathered(folder: Path, **params):
    return gather({"toy": SourceParams(kind="energon", path=str(folder), **params)}).sources


def _parts(source) -> list[str]:
    return [Path(source.root, part.path).name for part in source.parts]


def test_splits_and_fields(folder: Path) -> None:
    train, heldout = _gathered(folder)
    assert (train.kind, train.name, train.split) == ("webdataset", "toy", "train")
    assert _parts(train) == ["shard_000.tar", "shard_001.tar"]
    assert (heldout.name, heldout.split) == ("toy", "heldout")
    assert _parts(heldout) == ["shard_002.tar", "shard_003.tar"]
    assert train.columns == {"image": "jpg", "caption": "txt"}


def test_questions_answers_and_json_places(folder: Path) -> None:
    fields = "field_map:\n  image: jpg,png\n  context: json[question]\n  answers: json[answers]\n"
    _write(folder, dataset=DATASET.partition("field_map")[0].replace("Captioning", "VQA") + fields)
    assert _gathered(folder)[0].columns == {
        "image": "jpg,png",
        "question": "json[question]",
        "answer": "json[answers]",
    }


def test_crude_samples_are_read_as_any_tar_is(folder: Path) -> None:
    _write(folder, dataset="__module__: megatron.energon\n__class__: CrudeWebdataset\n")
    assert [source.columns for source in _gathered(folder)] == [{}, {}]


def test_a_folder_without_held_out_shards_may_hold_samples_out(folder: Path) -> None:
    _write(folder, split="split_parts:\n  train: [shards/shard_000.tar]\n  val: []\n  test: []\n")
    (whole,) = _gathered(folder)
    assert (whole.split, whole.heldout_fraction) == ("train", 0.0)
    (parted,) = _gathered(folder, heldout_fraction=0.2)
    assert (parted.split, parted.heldout_fraction) == (None, 0.2)


def test_excluded_shards_are_left_out(folder: Path) -> None:
    _write(folder, split=SPLIT.replace("[]", "['shards/shard_{000,003}.tar']"))
    train, heldout = _gathered(folder)
    assert (_parts(train), _parts(heldout)) == (["shard_001.tar"], ["shard_002.tar"])


def test_code_that_a_folder_names_is_not_run_but_columns_replace_it(folder: Path) -> None:
    loader = "sample_type:\n  __module__: megatron.energon\n  __class__: VQASample\n"
    _write(folder, dataset=loader + "sample_loader: sample_loader.py:sample_loader\n")
    (folder / ".nv-meta" / "sample_loader.py").write_text("raise SystemExit('run')")
    with pytest.raises(DataError, match=r"not run.*'columns'"):
        _gathered(folder)
    columns = {"image": "jpg", "caption": "txt"}
    assert _gathered(folder, columns=columns)[0].columns == columns


@pytest.mark.parametrize(
    ("split", "dataset", "message"),
    [
        ("", DATASET, "holds no fields"),
        ("a: 1", DATASET, "no 'split_parts'"),
        ("split_parts: {train: shard.tar}", DATASET, "no list of shards"),
        ("split_parts: {train: ['a{0..']}", DATASET, "broken pattern"),
        ("split_parts: {dev: []}", DATASET, "split 'dev'"),
        ("split_parts: {train: ['../../evil.tar']}", DATASET, "outside the folder"),
        ("split_parts: {train: ['/etc/evil.tar']}", DATASET, "outside the folder"),
        ("split_parts: {train: ['s3://x/evil.tar']}", DATASET, "outside the folder"),
        ("split_parts: {train: []}", DATASET, "has no shard"),
        ("split_parts: {train: [shards/none.tar]}", DATASET, r"none\.tar"),
        (SPLIT.replace("[]", "['shards/shard_000.tar/7']"), DATASET, "excludes single samples"),
        ("!!python/object/apply:os.system ['true']", DATASET, "not plain YAML"),
        ("{" * 3000, DATASET, "not plain YAML"),
        (SPLIT, DATASET.replace("Captioning", "Interleaved"), "InterleavedSample"),
        (SPLIT, "", "holds no fields"),
    ],
)
def test_what_cannot_be_used_is_refused(folder, split, dataset, message) -> None:
    _write(folder, split=split, dataset=dataset)
    with pytest.raises(DataError, match=message):
        _gathered(folder)


def test_a_folder_that_was_not_prepared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no \.nv-meta/split\.yaml.*energon prepare"):
        _gathered(tmp_path)
