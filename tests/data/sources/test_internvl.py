"""InternVL's meta file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diptych.core.errors import DataError
from diptych.data.sources import RawRow, SourceParams, gather, read_part


def _set(root: str, annotation: str, **fields: Any) -> dict[str, Any]:
    return {"root": root, "annotation": annotation, "data_augment": False, "length": 1} | fields


def _gathered(folder: Path, meta: Any, **params: Any):
    path = folder / "meta.json"
    path.write_text(meta if isinstance(meta, str) else json.dumps(meta))
    return gather({"mix": SourceParams(kind="internvl", path=str(path), **params)}).sources


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("coco/images", "chart", "notes"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "notes" / "coco.jsonl").write_text('{"id": 1}\n{"id": 2}\n')
    (tmp_path / "notes" / "chart.jsonl").write_text('{"id": 1}\n')
    return tmp_path


def test_each_set_is_a_source_that_keeps_its_name(folder: Path) -> None:
    coco, chart = _gathered(
        folder,
        {
            "COCO_caps v1.5": _set("coco/images", "notes/coco.jsonl", repeat_time=0.03),
            "chartqa_18k": _set(str(folder / "chart"), "notes/chart.jsonl", repeat_time=4),
            "unused": _set("chart", "notes/chart.jsonl", repeat_time=0),
        },
        repeat=2.0,
        heldout_fraction=0.1,
    )
    assert (coco.name, coco.kind, coco.repeat) == ("mix-coco_caps-v1-5", "llava", 0.06)
    assert (chart.name, chart.kind, chart.repeat) == ("mix-chartqa_18k", "llava", 8.0)
    assert Path(coco.images) == folder / "coco" / "images"
    assert Path(chart.images) == folder / "chart"
    assert chart.heldout_fraction == 0.1
    rows = list(read_part(coco, coco.parts[0]))
    assert [row.value for row in rows if isinstance(row, RawRow)] == [{"id": 1}, {"id": 2}]


def test_paths_are_relative_to_the_project_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = folder / "project"
    (project / "notes").mkdir(parents=True)
    (project / "notes" / "coco.jsonl").write_text('{"id": 3}\n')
    monkeypatch.chdir(project)
    (source,) = _gathered(folder, {"coco": _set("notes", "notes/coco.jsonl")})
    assert (source.root, source.images) == ("notes", "notes")


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ("[", "cannot be used as InternVL's meta file"),
        ("[]", "no JSON object"),
        ("{}", "no JSON object"),
        ('{"a": 1}', "set 'a' is no JSON object"),
        ({"a": {"root": "chart"}}, "no 'annotation'"),
        ({"a": {"annotation": "notes/chart.jsonl", "root": ["chart"]}}, "no 'root'"),
        ({"a": _set("chart", "notes/chart.jsonl", repeat_time="2")}, "no number"),
        ({"a": _set("chart", "notes/chart.jsonl", repeat_time=-1)}, "-1"),
        ('{"a": {"root": "b", "annotation": "c", "repeat_time": NaN}}', "nan"),
        ({"a": _set("chart", "notes/none.jsonl")}, r"none\.jsonl"),
        ({"a": _set("none", "notes/chart.jsonl")}, "image folder.*none"),
        ({"a": _set("ftp://x/y", "notes/chart.jsonl")}, "ftp://"),
        (
            {name: _set("chart", "notes/chart.jsonl") for name in ("A b", "a-b")},
            "two sets would both be the source 'mix-a-b'",
        ),
        ({"a" * 80: _set("chart", "notes/chart.jsonl")}, "cannot be named"),
        ("[" * 100_000, "cannot be used"),
    ],
)
def test_what_cannot_work_is_refused(folder: Path, meta: Any, message: str) -> None:
    from diptych.core.errors import DiptychError

    with pytest.raises(DiptychError, match=message):
        _gathered(folder, meta)


def test_a_missing_meta_file_is_named(folder: Path) -> None:
    (folder / "meta.json").touch()
    params = SourceParams(kind="internvl", path=str(folder / "mete.json"))
    with pytest.raises(DataError, match=r"Did you mean 'meta\.json'"):
        gather({"mix": params})
