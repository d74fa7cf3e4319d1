"""Sources in a real S3 server and over HTTP."""

from __future__ import annotations

import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diptych.core.errors import ConfigError, DataError
from diptych.core.records import RawSource
from diptych.data.sources import RawRow, Refusal, SourceParams, gather, read_part
from diptych.data.sources.blobs import BlobReader
from tests.data.conftest import put
from tests.data.servers import Proxy

ROW = {
    "id": "a",
    "image": "x.png",
    "conversations": [
        {"from": "human", "value": "<image>\nWhat?"},
        {"from": "gpt", "value": "A cat."},
    ],
}


def _parquet() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"image": [b"one", b"two"], "caption": ["a", "b"]}), file)
    return file.getvalue()


@pytest.fixture
def bucket(s3: Proxy) -> str:
    meta = {"coco": {"root": "images", "annotation": "notes/a.json", "repeat_time": 2}}
    energon = "sample_type: {__class__: CaptioningSample}\nfield_map: {image: jpg, caption: txt}\n"
    files = {
        "notes/a.json": json.dumps([ROW]).encode(),
        "notes/b.jsonl": json.dumps(ROW).encode() + b"\nnot JSON\n",
        "images/x.png": b"image",
        "table/train-0.parquet": _parquet(),
        "table/train-1.parquet": _parquet(),
        "table/notes.txt": b"",
        "words.csv": b"image,caption\nx.png,a cat\n",
        "meta.json": json.dumps(meta).encode(),
        "escaping.json": json.dumps({"a": {"root": "/etc", "annotation": "a.json"}}).encode(),
        "en/.nv-meta/split.yaml": b"split_parts: {train: ['s/{0..1}.tar']}",
        "en/.nv-meta/dataset.yaml": energon.encode(),
        "en/s/0.tar": b"0",
        "en/s/1.tar": b"1",
    }
    put(s3, files, bucket="raw")
    return "s3://raw"


def _gathered(kind: Any, *paths: str, **params: Any) -> RawSource:
    path = paths[0] if len(paths) == 1 else list(paths)
    return gather({"toy": SourceParams(kind=kind, path=path, **params)}).sources[0]


def _rows(source: RawSource) -> list[RawRow | Refusal]:
    return [row for part in source.parts for row in read_part(source, part)]


def _parts(source: RawSource) -> list[str]:
    return [part.path for part in source.parts]


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_rows_and_images(s3: Proxy, bucket: str, scheme: str) -> None:
    root = bucket if scheme == "s3" else f"{s3.url}/raw"
    source = _gathered(
        "llava", f"{root}/notes/a.json", f"{root}/notes/b.jsonl", images=f"{root}/images"
    )
    assert source.root == f"{root}/notes"
    assert source.num_image_files is source.listing_sha256 is None
    assert all(part.stamp.startswith("etag:") for part in source.parts)
    one, two, refusal = _rows(source)
    assert isinstance(one, RawRow)
    assert isinstance(two, RawRow)
    assert isinstance(refusal, Refusal)
    assert one.value == two.value == ROW
    assert refusal.label == "b.jsonl:line-2"
    assert BlobReader(source).read(file="x.png", offset=-1, length=-1, place=0) == b"image"


def test_folders_globs_and_braces(bucket: str) -> None:
    both = ["train-0.parquet", "train-1.parquet"]
    assert _parts(_gathered("parquet", f"{bucket}/table")) == both
    assert _parts(_gathered("parquet", f"{bucket}/table/")) == both
    assert _parts(_gathered("parquet", f"{bucket}/table/train-*.parquet")) == both
    assert _parts(_gathered("parquet", f"{bucket}/table/train-{{0..1}}.parquet")) == both
    assert _parts(_gathered("parquet", bucket)) == both
    assert _gathered("parquet", bucket).root == f"{bucket}/table"
    for path in ("none", "table/none-*.parquet", "table/none.parquet"):
        with pytest.raises(DataError, match="names no file"):
            _gathered("parquet", f"{bucket}/{path}")


def test_a_web_server_lists_no_folders(s3: Proxy, bucket: str) -> None:
    files = _gathered("parquet", f"{s3.url}/raw/table/train-{{0..1}}.parquet")
    assert _parts(files) == ["train-0.parquet", "train-1.parquet"]
    with pytest.raises(DataError, match="lists no folders"):
        _gathered("parquet", f"{s3.url}/raw/none")
    with pytest.raises(ConfigError, match="no folder in common"):
        _gathered("parquet", f"{bucket}/table/train-0.parquet", f"{s3.url}/raw/words.csv")


def test_tables(bucket: str) -> None:
    source = _gathered("parquet", f"{bucket}/table")
    rows = _rows(source)
    assert [row.label for row in rows[:2]] == ["train-0.parquet:row-1", "train-0.parquet:row-2"]
    reader = BlobReader(source)
    for row in rows:
        assert isinstance(row, RawRow)
        assert row.blobs is not None
        (blob,) = row.blobs
        data = reader.read(file=blob.file, offset=blob.offset, length=blob.length, place=0)
        assert data == blob.data
    (row,) = _rows(_gathered("csv", f"{bucket}/words.csv"))
    assert isinstance(row, RawRow)
    assert row.value["images"] == ["x.png"]


def test_meta_files_name_only_what_lies_beside_them(bucket: str) -> None:
    source = _gathered("internvl", f"{bucket}/meta.json")
    assert (source.name, source.repeat) == ("toy-coco", 2.0)
    assert source.images == f"{bucket}/images"
    assert len(_rows(source)) == 1
    with pytest.raises(DataError, match="leaves the folder"):
        _gathered("internvl", f"{bucket}/escaping.json")
    with pytest.raises(DataError, match="There is no"):
        _gathered("internvl", f"{bucket}/none.json")


def test_energon_folders(bucket: str) -> None:
    source = _gathered("energon", f"{bucket}/en")
    assert (source.root, _parts(source)) == (f"{bucket}/en/s", ["0.tar", "1.tar"])
    assert source.columns == {"image": "jpg", "caption": "txt"}


def test_a_file_that_is_replaced_is_noticed(s3: Proxy, bucket: str) -> None:
    source = _gathered("llava", f"{bucket}/notes/b.jsonl")
    rows = read_part(source, source.parts[0])
    next(rows)
    put(s3, {"notes/b.jsonl": b'{"id": 9}\n'}, bucket="raw")
    *_, refusal = rows
    assert isinstance(refusal, Refusal)
    assert "changed while it was read" in refusal.detail
    again = _gathered("llava", f"{bucket}/notes/b.jsonl")
    assert again.parts[0].stamp != source.parts[0].stamp


def test_a_server_that_fails_is_an_error_not_a_refusal(s3: Proxy, bucket: str) -> None:
    source = _gathered("llava", f"{bucket}/notes/b.jsonl")
    s3.plan(*["503"] * 20)
    with pytest.raises(DataError, match="after 5 attempts"):
        _rows(source)
