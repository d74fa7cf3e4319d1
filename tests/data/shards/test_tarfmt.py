"""The bytes of a tar and the spelling of names in it."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st

from diptych.data.shards.tarfmt import lay_out, quote_key, write_tar

MEMBERS = [
    (f"s/{n}.txt", bytes([65 + n]) * size)
    for n, size in enumerate([0, 1, 511, 512, 513, 5000, 200_000])
]


def test_the_bytes_are_those_of_a_plain_ustar_archive(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", members=MEMBERS)
    expected = io.BytesIO()
    with tarfile.open(fileobj=expected, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in MEMBERS:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    assert (tmp_path / "a.tar").read_bytes() == expected.getvalue()


def test_the_bytes_are_those_of_webdatasets_writer(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", members=MEMBERS)
    options = {"user": "", "group": "", "mode": 0o644, "encoder": False, "mtime": 0}
    with webdataset.TarWriter(str(tmp_path / "b.tar"), **options) as tar:
        for name, data in MEMBERS:
            tar.write({"__key__": name.partition(".")[0], "txt": data})
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


def test_a_name_that_needs_an_extended_header_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too long"):
        write_tar(tmp_path / "a.tar", members=[("x" * 101, b"")])


def test_no_member_has_an_extended_header_a_time_or_an_owner(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", members=MEMBERS)
    raw = (tmp_path / "a.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar") as tar:
        members = tar.getmembers()
    for member in members:
        assert member.offset + 512 == member.offset_data
        assert raw[member.offset + 257 : member.offset + 265] == b"ustar\x0000"
        facts = (member.mtime, member.uid, member.gid, member.uname, member.gname)
        assert facts == (0, 0, 0, "", "")
        assert member.isreg()
        assert member.mode == 0o644


def test_the_layout_says_where_members_lie(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", members=MEMBERS)
    offsets, end = lay_out(len(data) for _, data in MEMBERS)
    raw = (tmp_path / "a.tar").read_bytes()
    for at, (_, data) in zip(offsets, MEMBERS, strict=True):
        assert raw[at : at + len(data)] == data
    assert not raw[end:].strip(b"\0")
    assert lay_out([]) == ([], 0)


def test_long_names_end_in_their_hash() -> None:
    digest = hashlib.sha256(b"x" * 300).hexdigest()[:20]
    assert quote_key("toy/" + "x" * 300) == "toy/" + "x" * 62 + "%-" + digest
    assert quote_key("toy/" + "x" * 84) == "toy/" + "x" * 84
    assert quote_key("toy/ä.1/b") == "toy/%C3%A4%2E1%2Fb"


@given(
    st.from_regex(r"[a-z0-9][a-z0-9_-]{0,63}", fullmatch=True),
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), unique=True),
)
def test_stems_are_safe_and_differ(source: str, names: list[str]) -> None:
    stems = [quote_key(f"{source}/{name}") for name in names]
    assert len(set(stems)) == len(names)
    safe = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_%"
    for stem in stems:
        folder, _, rest = stem.partition("/")
        assert folder == source
        assert rest
        assert not set(rest) - set(safe)
        assert len(stem) <= 88
