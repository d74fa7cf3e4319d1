"""The walk over a tar's headers against Python's tarfile, and what stops it."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
import time
from pathlib import Path

import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.data.reasons import Refused
from diptych.data.sources.members import Member, walk_members


def make_tar(*members: tuple[str, bytes], format: int = tarfile.USTAR_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as tar:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return file.getvalue()


def walk(data: bytes) -> tuple[list[Member], Refused | None]:
    """Return the members, and what ended the walk if it did not end well."""
    found: list[Member] = []
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            for member in walk_members(file.fileno()):
                found.append(member)
        except Refused as error:
            return found, error
    return found, None


def with_field(header: bytes, *, start: int, field: bytes) -> bytes:
    """Overwrite a field of a header and correct its checksum."""
    changed = bytearray(header)
    changed[start : start + len(field)] = field
    changed[148:156] = b" " * 8
    changed[148:156] = b"%06o\0 " % sum(changed[:512])
    return bytes(changed)


NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1
)
MEMBERS = st.lists(
    st.tuples(
        st.one_of(
            NAMES,
            st.tuples(NAMES, NAMES).map("/".join),
            st.integers(90, 300).map(lambda length: "d" * (length // 2) + "/" + "n" * length),
        ).filter(lambda name: not name.startswith("/")),
        st.one_of(st.binary(max_size=40), st.sampled_from([b"x" * 512, b"x" * 9_000])),
    ),
    max_size=6,
)


@settings(deadline=None)
@given(MEMBERS, st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_members_are_those_that_tarfile_finds(members, format) -> None:
    data = make_tar(*members, format=format)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        expected = [(entry.name, entry.offset_data, entry.size) for entry in tar]
    found, problem = walk(data)
    assert problem is None
    assert [(member.name, member.offset, member.length) for member in found] == expected


def test_webdatasets_own_writer_is_read(tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(3):
            writer.write({"__key__": f"{number:03d}", "txt": f"text {number}", "bin": b"x" * 600})
    data = (tmp_path / "a.tar").read_bytes()
    found, problem = walk(data)
    assert problem is None
    assert [member.name for member in found] == [
        f"{number:03d}.{suffix}" for number in range(3) for suffix in ("bin", "txt")
    ]
    assert found[0].offset == 1536
    texts = [data[member.offset : member.offset + member.length] for member in found[1::2]]
    assert texts == [b"text 0", b"text 1", b"text 2"]


def test_a_ustar_prefix_is_part_of_the_name() -> None:
    name = "f" * 120 + "/" + "n" * 90 + ".txt"
    (member,), problem = walk(make_tar((name, b"abc")))
    assert problem is None
    assert member == Member(name, 512, 3)


def test_small_content_is_kept_up_to_a_limit() -> None:
    texts = [b"x" * length for length in (300, 9_000, 200, 100)]
    data = make_tar(*((f"{number}.txt", text) for number, text in enumerate(texts)))
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        found = list(walk_members(file.fileno(), max_kept_bytes=500))
    kept = [(text, member.data) for text, member in zip(texts, found, strict=True)]
    assert all(text == data for text, data in kept if data is not None)
    assert [data is not None for _, data in kept] == [True, False, True, False]
    assert [member[:4] for member in found] == [member[:4] for member in walk(data)[0]]


def test_old_tars_without_magic_are_read() -> None:
    data = make_tar(("a.txt", b"abc"))
    data = with_field(data[:512], start=257, field=bytes(8)) + data[512:]
    data = with_field(data[:512], start=156, field=b"\0") + data[512:]
    assert walk(data) == ([Member("a.txt", 512, 3)], None)


def test_joined_tars_are_read_to_their_end() -> None:
    data = make_tar(("a.txt", b"abc"), ("b.txt", b""))
    found, problem = walk(data + make_tar(("c.txt", b"d")))
    assert problem is None
    assert [(member.name, member.offset) for member in found] == [
        ("a.txt", 512),
        ("b.txt", 1536),
        ("c.txt", len(data) + 512),
    ]


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (tarfile.SYMTYPE, "a symbolic link"),
        (tarfile.LNKTYPE, "a hard link"),
        (tarfile.CHRTYPE, "a device"),
        (tarfile.BLKTYPE, "a device"),
        (tarfile.FIFOTYPE, "a pipe"),
        (tarfile.GNUTYPE_SPARSE, "a sparse file"),
        (b"Z", "of the unknown type 'Z'"),
    ],
)
def test_what_is_no_file_is_named_and_never_followed(kind: bytes, what: str) -> None:
    data = make_tar(("bad", b""), ("a.txt", b"abc"))
    data = with_field(data[:512], start=156, field=kind) + data[512:]
    assert walk(data) == ([Member("bad", 512, 0, what), Member("a.txt", 1024, 3)], None)


def test_folders_are_passed_over() -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        entry = tarfile.TarInfo("folder")
        entry.type = tarfile.DIRTYPE
        tar.addfile(entry)
    assert walk(file.getvalue()) == ([], None)


@pytest.mark.parametrize(
    "size",
    [
        b"-0000000001\0",
        b"\xff" * 12,
        b"00000000009\0",
        b"0x000000001\0",
        b"\xff" + bytes(10) + b"\x01",
    ],
)
def test_a_size_that_is_none_ends_the_walk(size: bytes) -> None:
    data = make_tar(("a.txt", b"abc"), ("b.txt", b"abc"))
    data = data[:1024] + with_field(data[1024:1536], start=124, field=size) + data[1536:]
    found, problem = walk(data)
    assert [member.name for member in found] == ["a.txt"]
    assert problem is not None
    assert problem.reason == "damaged_part"
    assert "At byte 1,024 a member's size is no whole number" in problem.detail


def test_a_size_in_base_256_is_read_and_one_beyond_the_file_is_truncation() -> None:
    data = make_tar(("a.txt", b"abc"))
    small = with_field(data[:512], start=124, field=b"\x80" + bytes(10) + b"\x03") + data[512:]
    assert walk(small) == ([Member("a.txt", 512, 3)], None)
    large = with_field(data[:512], start=124, field=b"\x80" + b"\x7f" * 11) + data[512:]
    found, problem = walk(large)
    assert (found, problem and problem.reason) == ([], "truncated_part")


@pytest.mark.parametrize("cut", [1500, 1536, 1537, 1935])
def test_what_comes_before_the_cut_is_used(cut: int) -> None:
    data = make_tar(("a.txt", b"abc"), ("b.txt", b"x" * 400), ("c.txt", b"abc"))
    found, problem = walk(data[:cut])
    assert [member.name for member in found] == ["a.txt"]
    assert problem is not None
    assert problem.reason == "truncated_part"
    assert "1 members before it are used" in problem.detail


def test_a_tar_without_end_mark_was_cut_between_members() -> None:
    found, problem = walk(make_tar(("a.txt", b"abc"), ("b.txt", b"abc"))[:1024])
    assert [member.name for member in found] == ["a.txt"]
    assert problem is not None
    assert "no end mark" in problem.detail


def test_a_damaged_header_ends_the_walk() -> None:
    data = bytearray(make_tar(("a.txt", b"abc"), ("b.txt", b"abc")))
    data[1030] ^= 1
    found, problem = walk(bytes(data))
    assert [member.name for member in found] == ["a.txt"]
    assert problem is not None
    assert problem.reason == "damaged_part"
    assert "At byte 1,024 there is no header" in problem.detail


@pytest.mark.parametrize(("mode", "kind"), [("w:gz", "gzip"), ("w:bz2", "bzip2"), ("w:xz", "xz")])
def test_a_compressed_tar_says_what_to_do(mode: str, kind: str) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as tar:  # type: ignore[call-overload]
        tar.addfile(tarfile.TarInfo("a.txt"))
    found, problem = walk(file.getvalue() + bytes(512))
    assert found == []
    assert problem is not None
    assert f"compressed ({kind})" in problem.detail
    assert "Unpack it to a plain .tar" in problem.detail


@pytest.mark.parametrize(
    "content",
    [
        b"zz path=a\n",
        b"999 path=a\n",
        b"9 path=a",
        b"4 path=a\n",
        b"18 size=-00000012\n",
        b"26 size=99999999999999999\xb2\n",
    ],
)
def test_damaged_pax_records_end_the_walk(content: bytes) -> None:
    data = make_tar(("pax", content), ("a.txt", b"abc"))
    found, problem = walk(with_field(data[:512], start=156, field=b"x") + data[512:])
    assert found == []
    assert problem is not None
    assert problem.reason == "damaged_part"


def test_a_pax_size_overrides_the_headers() -> None:
    data = make_tar(("pax", b"9 size=3\n"), ("a.txt", b"abc"))
    data = with_field(data[:512], start=156, field=b"x") + data[512:]
    lying = with_field(data[1024:1536], start=124, field=b"00000000000\0")
    assert walk(data[:1024] + lying + data[1536:]) == ([Member("a.txt", 1536, 3)], None)


def test_a_file_that_shrinks_while_it_is_walked_ends_the_walk(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(make_tar(*((f"{number}.txt", b"x" * 6_000) for number in range(9))))
    file = os.open(path, os.O_RDONLY)
    try:
        members = walk_members(file)
        next(members)
        os.truncate(path, 1000)
        with pytest.raises(Refused) as caught:
            list(members)
    finally:
        os.close(file)
    assert caught.value.reason == "truncated_part"


def test_a_long_tail_of_zeros_takes_no_time() -> None:
    start = time.process_time()
    assert walk(make_tar(("a.txt", b"abc")) + bytes(20 << 20))[1] is None
    assert time.process_time() - start < 2
