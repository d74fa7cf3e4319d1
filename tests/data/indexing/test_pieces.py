"""A file of many rows is examined in pieces, which change nothing but the names of the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.core.hashing import sha256_folder
from diptych.data.indexing import index as index_module
from diptych.data.indexing import survey as survey_module
from diptych.data.indexing.index import IndexParams, index
from tests.data.conftest import Dataset


def test_a_file_of_many_rows_is_examined_in_pieces(
    dataset: Dataset, look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dataset.fill(30)
    dataset.add("bad", "nowhere.jpg")
    dataset.add("good-3", dataset.rows[8]["image"])
    dataset.add("twin", dataset.rows[5]["image"], answer="5")
    raw_samples = dataset.write()
    whole, quarantine = look(raw_samples)
    assert quarantine.num_rows == 3
    monkeypatch.setattr(survey_module, "_MIN_CUT_BYTES", 0)
    monkeypatch.setattr(survey_module, "_ROWS_PER_PIECE", 8)
    pieces, same = look(raw_samples)
    assert pieces.combine_chunks().equals(whole.combine_chunks())
    assert same.equals(quarantine)
    expected = sha256_folder(dataset.folder / "sample_index")
    names = [path.name for path in sorted((dataset.folder / "sample_index").iterdir())]
    assert names == [f"{number:06d}-toy.parquet" for number in range(4)]
    # In processes, the pieces are the same.
    monkeypatch.setattr(index_module, "_SMALL_BYTES", 0)
    params = IndexParams(max_quarantined_fraction=1, num_processes=2)
    assert sha256_folder(index(raw_samples, params, str(tmp_path / "x"))[0]) == expected
    monkeypatch.setattr(survey_module, "_ENOUGH_PARTS", 1)
    assert look(raw_samples)[0].equals(whole)


def test_a_stopped_run_goes_on_from_its_finished_pieces(
    dataset: Dataset, look, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset.fill(30)
    raw_samples = dataset.write()
    monkeypatch.setattr(survey_module, "_MIN_CUT_BYTES", 0)
    monkeypatch.setattr(survey_module, "_ROWS_PER_PIECE", 8)
    look(raw_samples)
    expected = sha256_folder(dataset.folder / "sample_index")
    examined: list[str] = []
    original = survey_module.Examiner.examine

    def examine(examiner, raw):
        if len(examined) == 20:
            raise KeyboardInterrupt
        examined.append(raw.label)
        return original(examiner, raw)

    monkeypatch.setattr(survey_module.Examiner, "examine", examine)
    with pytest.raises(KeyboardInterrupt):
        look(raw_samples)
    examined.clear()
    look(raw_samples)
    assert examined == [f"row-{number}" for number in range(17, 31)]
    assert sha256_folder(dataset.folder / "sample_index") == expected
