"""What of a WebDataset tar becomes a sample, and what is refused for which reason."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import webdataset
from PIL import Image
from webdataset import tariterators

from diptych.core.records import RawPart, RawSamples, RawSource
from diptych.core.tables import read_parts
from diptych.data.indexing.index import IndexParams, index
from diptych.data.sources.blobs import BlobReader
from diptych.data.sources.row import RawRow, Refusal
from diptych.data.sources.tars import read_tar
from tests.data.conftest import encoded, pixels
from tests.data.sources.test_members import make_tar

JPG = encoded(Image.fromarray(pixels(12, 8)), format="JPEG")
PNG = encoded(Image.fromarray(pixels(6, 9)), format="PNG")


def talk(num_images: int = 1, **fields: Any) -> bytes:
    question = "<image>\n" * num_images + "What is it?"
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "a thing"}]
    return json.dumps({"conversations": turns, **fields}).encode()


class Tars:
    """A folder of tars in the making."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, *members: tuple[str, bytes], name: str = "a.tar") -> Tars:
        (self.folder / name).write_bytes(make_tar(*members))
        return self

    def source(self, **fields: Any) -> RawSource:
        parts = tuple(
            RawPart(path=path.name, num_bytes=path.stat().st_size, stamp="stat:0")
            for path in sorted(self.folder.glob("*.t*"))
        )
        root = str(self.folder)
        return RawSource(
            name="web", kind="webdataset", root=root, images=root, parts=parts, **fields
        )

    def read(self, **fields: Any) -> tuple[list[RawRow], list[Refusal]]:
        source = self.source(**fields)
        found = [row for part in source.parts for row in read_tar(source, part)]
        rows = [row for row in found if isinstance(row, RawRow)]
        return rows, [row for row in found if isinstance(row, Refusal)]

    def index(self, **fields: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        raw_samples = RawSamples(sources=(self.source(**fields),))
        params = IndexParams(max_quarantined_fraction=1)
        folder, quarantine = index(raw_samples, params, str(self.folder / "out" / "sample_index"))
        return pa.concat_tables(read_parts(folder)).to_pylist(), quarantine.to_pylist()


@pytest.fixture
def tars(tmp_path: Path) -> Tars:
    return Tars(tmp_path / "tars")


def names(row: RawRow) -> list[str]:
    return [blob.name for blob in row.blobs or ()]


def test_a_caption_answers_the_prompt(tars: Tars) -> None:
    tars.write(("x/1.jpg", JPG), ("x/1.txt", b"\xef\xbb\xbfa thing\n"), ("x/2.jpg", PNG))
    tars.write(("x/2.txt", "zwölf".encode()), name="b.tar")
    rows, refusals = tars.read(prompt="Say it.")
    (row,) = rows
    assert row.label == "a/x/1"
    assert row.value["messages"] == [
        {"role": "user", "content": "<image>\nSay it."},
        {"role": "assistant", "content": "a thing"},
    ]
    # Samples are joined within a tar, not over tars.
    assert [(refusal.label, refusal.reason) for refusal in refusals] == [
        ("a/x/2", "malformed_row"),
        ("b/x/2", "missing_image"),
    ]


def test_places_are_those_of_the_bytes(tars: Tars) -> None:
    rows, quarantine = tars.write(
        ("1.0.jpg", JPG), ("1.1.PNG", PNG), ("1.json", talk(2, id="one")), ("2.json", talk(0))
    ).index()
    assert quarantine == []
    first, second = rows
    assert first["key"] == "web/one"
    assert first["image_names"] == ["1.0.jpg", "1.1.PNG"]
    assert first["image_files"] == ["a.tar", "a.tar"]
    assert (first["widths_px"], first["heights_px"]) == ([12, 6], [8, 9])
    assert first["image_lengths"] == [len(JPG), len(PNG)]
    reader = BlobReader(tars.source())
    found = [
        reader.read(file="a.tar", offset=offset, length=length, place=place)
        for place, (offset, length) in enumerate(
            zip(first["image_offsets"], first["image_lengths"], strict=True)
        )
    ]
    assert found == [JPG, PNG]
    assert (second["key"], second["image_names"]) == ("web/a/2", [])


def test_webdatasets_own_writer_and_reader_agree_with_ours(tars: Tars) -> None:
    path = tars.folder / "w.tar"
    with webdataset.TarWriter(str(path)) as writer:
        for number in range(5):
            writer.write({"__key__": f"d.1/{number}", "jpg": JPG, "json": json.loads(talk())})
    with path.open("rb") as file:
        files = tariterators.tar_file_expander([{"url": str(path), "stream": file}])
        theirs = list(tariterators.group_by_keys(files))
    rows, refusals = tars.read()
    assert refusals == []
    assert [row.label for row in rows] == [f"w/{sample['__key__']}" for sample in theirs]
    assert [row.blobs[0].data for row in rows if row.blobs] == [sample["jpg"] for sample in theirs]


def test_members_of_a_sample_may_lie_apart(tars: Tars) -> None:
    tars.write(("1.jpg", JPG), ("2.jpg", PNG), ("2.json", talk()), ("1.json", talk()))
    rows, refusals = tars.read()
    assert refusals == []
    assert [(row.label, names(row)) for row in rows] == [("a/1", ["1.jpg"]), ("a/2", ["2.jpg"])]


@pytest.mark.parametrize(
    ("members", "fields", "expected"),
    [
        (["k.10.jpg", "k.9.jpg"], {}, ["k.9.jpg", "k.10.jpg"]),
        (["k.v2.jpg", "k.v1.jpg"], {}, ["k.v2.jpg", "k.v1.jpg"]),
        (["k.v1.jpg", "k.v2.jpg"], {"images": ["k.v2.jpg", "k.v1.jpg"]}, ["k.v2.jpg", "k.v1.jpg"]),
        (["k.v1.jpg", "k.v2.jpg"], {"images": ["v2.jpg", "v1.jpg"]}, ["k.v2.jpg", "k.v1.jpg"]),
        (["k.v1.jpg", "k.v2.jpg"], {"images": ["coco/7.jpg", 3]}, ["k.v1.jpg", "k.v2.jpg"]),
        (["./k.jpg", "./k.JPEG"], {"image": "coco/7.jpg"}, ["./k.jpg", "./k.JPEG"]),
    ],
)
def test_images_have_an_order(tars: Tars, members, fields, expected) -> None:
    tars.write(*((name, JPG) for name in members), ("k.json", talk(2, **fields)))
    rows, refusals = tars.read()
    assert refusals == []
    assert [names(row) for row in rows] == [expected]
    assert tars.index()[0][0]["image_names"] == expected


def test_content_parts_name_members(tars: Tars) -> None:
    parts = [{"type": "image", "image": "b.jpg"}, {"type": "text", "text": "and"}]
    parts.append({"type": "image", "image": "a.jpg"})
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "two"}]
    text = json.dumps({"messages": turns}).encode()
    rows, quarantine = tars.write(("k.a.jpg", JPG), ("k.b.jpg", PNG), ("k.json", text)).index()
    assert quarantine == []
    assert rows[0]["image_formats"] == ["png", "jpeg"]


def test_columns_say_which_member_holds_what(tars: Tars) -> None:
    document = {"qa": [{"q": "How many?", "a": ["two", "2"]}], "name": "n-1"}
    tars.write(
        ("1.left.jpg", JPG),
        ("1.right.jpg", PNG),
        ("1.other.jpg", PNG),
        ("1.json", json.dumps(document).encode()),
    )
    columns = {
        "images": "right.jpg,left.jpg",
        "question": "json[qa][0][q]",
        "answer": "json[qa][0][a]",
        "id": "json[name]",
    }
    rows, quarantine = tars.index(columns=columns)
    assert [row["image_names"] for row in rows] == [["1.right.jpg", "1.left.jpg"]]
    assert rows[0]["key"] == "web/n-1"
    assert json.loads(rows[0]["messages"]) == [
        {"role": "user", "text": "<image>\n<image>\nHow many?"},
        {"role": "assistant", "text": "two"},
    ]
    assert [(row["reason"], row["value"]) for row in quarantine] == [
        ("unused_member", "1.other.jpg")
    ]
    (refusal,) = tars.read(columns=columns | {"answer": "json[qa][1][a]"})[1][:1]
    assert refusal.reason == "malformed_row"
    assert "nothing at 'json[qa][1][a]'" in refusal.detail
    tars.write(("1.jpg", JPG), ("1.alt", b"a thing"))
    rows_, refusals = tars.read(columns={"image": "jpg;png", "caption": "txt;alt"})
    assert refusals == []
    assert rows_[0].value["messages"][1]["content"] == "a thing"


def test_gzipped_texts_are_unpacked_within_bounds(tars: Tars) -> None:
    tars.write(
        ("1.jpg", JPG),
        ("1.txt.gz", gzip.compress(b"a thing")),
        ("2.jpg", JPG),
        ("2.txt.gz", gzip.compress(bytes(65 << 20))),
        ("3.jpg", JPG),
        ("3.txt.gz", gzip.compress(b"a thing")[:-9]),
        ("4.jpg", JPG),
        ("4.json.gz", b"\x1f\x8b nothing"),
        ("5.jpg.gz", gzip.compress(JPG)),
    )
    rows, refusals = tars.read()
    assert [row.label for row in rows] == ["a/1"]
    assert [(refusal.label, refusal.reason) for refusal in refusals] == [
        ("a/2", "row_too_long"),
        ("a/3", "malformed_row"),
        ("a/4", "malformed_row"),
        ("a.tar/*.gz", "unused_member"),
    ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../../evil.jpg", "unsafe_member"),
        ("/etc/evil.jpg", "unsafe_member"),
        ("x/../../evil.jpg", "unsafe_member"),
        (".a.jpg", "unused_member"),
        ("README", "unused_member"),
        ("__meta__.json", "unused_member"),
        ("dir/._1.jpg", "unused_member"),
        ("1.", "unused_member"),
    ],
)
def test_unusable_names_are_refused_alone(tars: Tars, name: str, reason: str) -> None:
    tars.write(("1.jpg", JPG), (name, b"x"), ("1.txt", b"a thing"))
    rows, quarantine = tars.index()
    assert len(rows) == 1
    (row,) = quarantine
    assert (row["reason"], row["value"]) == (reason, name)
    assert row["key"] == f"web/a.tar/{name}"


def test_links_and_devices_are_refused(tars: Tars) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, kind in (("1.jpg", tarfile.SYMTYPE), ("2.jpg", tarfile.CHRTYPE)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "/etc/passwd"
            tar.addfile(entry)
    (tars.folder / "a.tar").write_bytes(file.getvalue())
    rows, refusals = tars.read()
    assert rows == []
    assert [(refusal.reason, refusal.value) for refusal in refusals] == [
        ("unsafe_member", "1.jpg"),
        ("unsafe_member", "2.jpg"),
    ]


def test_two_members_of_one_name_spoil_only_their_sample(tars: Tars) -> None:
    tars.write(("a.jpg", JPG), ("a.JPG", PNG), ("a.json", talk()), ("b.png", PNG), ("b.txt", b"b"))
    rows, refusals = tars.read()
    assert [row.label for row in rows] == ["a/b"]
    assert [(refusal.label, refusal.reason) for refusal in refusals] == [
        ("a/a", "duplicate_member")
    ]


def test_members_that_no_sample_takes_are_counted_once_by_format(tars: Tars) -> None:
    members = [
        (f"{number}.{suffix}", b"%d" % number) for number in range(5) for suffix in ("cls", "txt")
    ]
    images = [(f"{number}.jpg", JPG) for number in range(5)]
    rows, quarantine = tars.write(*members, *images).index()
    assert len(rows) == 5
    (row,) = [row for row in quarantine if row["reason"] == "unused_member"]
    assert row["detail"] == "a.tar/*.cls: 5 members '.cls' belong to no part of a sample"


def test_a_damaged_tar_gives_what_came_before(tars: Tars) -> None:
    members = [
        (f"{n}.{suffix}", data)
        for n in range(4)
        for suffix, data in (("jpg", JPG), ("txt", b"%d" % n))
    ]
    whole = make_tar(*members)
    (tars.folder / "a.tar").write_bytes(whole[: whole.index(b"1.jpg") + 900])
    (tars.folder / "b.tar").write_bytes(b"")
    (tars.folder / "c.tar").write_bytes(make_tar())
    with tarfile.open(tars.folder / "d.tgz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("x"))
    tars.write(*members, name="e.tar")
    rows, quarantine = tars.index()
    # The samples of the damaged tar are those of the whole one, and equal ones count once.
    assert [row["key"] for row in rows] == ["web/a/0", "web/e/1", "web/e/2", "web/e/3"]
    reasons = {
        row["key"]: row["reason"] for row in quarantine if row["key"].endswith(("tar", "gz"))
    }
    assert reasons == {
        "web/a.tar": "truncated_part",
        "web/b.tar": "empty_part",
        "web/c.tar": "empty_part",
        "web/d.tgz": "damaged_part",
    }
    assert any("Unpack it to a plain .tar" in row["detail"] for row in quarantine)


def test_a_sample_without_text_says_what_it_has(tars: Tars) -> None:
    tars.write(
        ("1.jpg", JPG), ("2.jpg", JPG), ("2.json", b"[1"), ("3.jpg", JPG), ("3.txt", b"\xff")
    )
    rows, refusals = tars.read()
    assert rows == []
    assert [(refusal.label, refusal.reason, refusal.value) for refusal in refusals] == [
        ("a/1", "malformed_row", "jpg"),
        ("a/2", "malformed_json", "b'[1'"),
        ("a/3", "malformed_row", "b'\\xff'"),
    ]


def test_a_large_image_is_left_where_it_is(tars: Tars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.data.sources.recipe._EAGER_BYTES", len(JPG) - 1)
    tars.write(("1.jpg", JPG), ("1.txt", b"a thing"))
    (row,), _ = tars.read()
    assert row.blobs is not None
    assert row.blobs[0].data is None
    assert tars.index()[0][0]["widths_px"] == [12]


def test_an_unreadable_tar_is_refused(tars: Tars) -> None:
    (tars.folder / "a.tar").mkdir()
    rows, refusals = tars.read()
    assert rows == []
    assert [refusal.reason for refusal in refusals] == ["damaged_part"]
