"""Poisoned shards: members that run code, links and escapes, in a source and in our own shards."""

from __future__ import annotations

import io
import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from webdataset import autodecode

from diptych.core.errors import DiptychError, FormatError
from diptych.core.hashing import sha256_file
from diptych.core.records import RawSamples
from diptych.data.indexing.index import IndexParams, index
from diptych.data.shards.reader import ShardReader
from diptych.data.shards.shard import ShardParams, shard
from tests.data.sources.test_tars import JPG, Tars
from tests.security.canary import Bomb, Canary


def as_npy(canary: Canary) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Bomb(canary.trace)], dtype=object), allow_pickle=True)
    return file.getvalue()


def as_npz(canary: Canary) -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.array([Bomb(canary.trace)], dtype=object))
    return file.getvalue()


def as_torch(canary: Canary) -> bytes:
    file = io.BytesIO()
    torch.save({"weights": Bomb(canary.trace)}, file)
    return file.getvalue()


def decode(suffix: str) -> Callable[[bytes], Any]:
    """Take webdataset's decoder of a suffix, which is on where nobody turns it off."""
    return autodecode.decoders[suffix]


def load_numpy(data: bytes) -> Any:
    return dict(enumerate(np.atleast_1d(np.load(io.BytesIO(data), allow_pickle=True))))


def load_npz(data: bytes) -> Any:
    return dict(np.load(io.BytesIO(data), allow_pickle=True))


def load_torch(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


POISONED: dict[str, tuple[Callable[[Canary], bytes], Callable[[bytes], Any]]] = {
    "pkl": (lambda canary: canary.pickled, decode("pkl")),
    "pickle": (lambda canary: canary.pickled, decode("pickle")),
    "pyd": (lambda canary: canary.pickled, decode("pyd")),
    "meta.pkl": (lambda canary: canary.pickled, decode("pkl")),
    "pth": (as_torch, decode("pth")),
    "pt": (as_torch, load_torch),
    "ckpt": (as_torch, load_torch),
    "bin": (as_torch, load_torch),
    "npy": (as_npy, load_numpy),
    "NPY": (as_npy, load_numpy),
    "npz": (as_npz, load_npz),
    "joblib": (lambda canary: canary.pickled, pickle.loads),
    "dill": (lambda canary: canary.pickled, pickle.loads),
}


@pytest.fixture
def tars(tmp_path: Path) -> Tars:
    return Tars(tmp_path / "tars")


def prepare(tars: Tars, out: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Index and shard; return the keys that were taken, and what was refused."""
    raw = RawSamples(sources=(tars.source(),))
    found, quarantine = index(raw, IndexParams(max_quarantined_fraction=1), str(out / "index"))
    folder, manifest = shard(found, raw, quarantine, ShardParams(), str(out / "shards"))
    reader = ShardReader(folder, manifest=manifest, split="train")
    keys = [reader.read(row).sample.key for row in range(len(reader))]
    return keys, quarantine.to_pylist()


@pytest.mark.parametrize("suffix", POISONED)
def test_a_member_that_can_run_code(
    canary: Canary, tars: Tars, tmp_path: Path, suffix: str
) -> None:
    make, fooled = POISONED[suffix]
    payload = make(canary)
    canary.proves(lambda: fooled(payload), raises=Exception)
    tars.write(("1.jpg", JPG), (f"1.{suffix}", payload), ("1.txt", b"a thing"))
    keys, (refused,) = prepare(tars, tmp_path / "out")
    assert keys == ["web/a/1"]
    assert (refused["reason"], refused["value"]) == ("executable_member", f"1.{suffix}")


@pytest.mark.parametrize("suffix", ["jpg", "png", "json", "txt"])
def test_a_pickle_under_an_innocent_name(
    canary: Canary, tars: Tars, tmp_path: Path, suffix: str
) -> None:
    canary.proves(lambda: pickle.loads(canary.pickled))
    members = {"jpg": JPG, "txt": b"a thing"} | {suffix: canary.pickled}
    tars.write(*((f"1.{name}", data) for name, data in members.items()), ("2.txt", b"fine"))
    tars.write(("3.jpg", JPG), ("3.txt", b"a thing"), name="b.tar")
    keys, refused = prepare(tars, tmp_path / "out")
    assert "web/b/3" in keys
    assert refused


def escaping(canary: Canary) -> bytes:
    """A tar that shows a secret by links, and writes outside by names."""
    outside = canary.trace
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, kind, target in (
            ("1.txt", tarfile.SYMTYPE, str(canary.secret_file)),
            ("2.txt", tarfile.LNKTYPE, str(canary.secret_file)),
            ("up", tarfile.SYMTYPE, str(outside.parent)),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, target
            tar.addfile(entry)
        for name in (f"up/{outside.name}/a.jpg", f"{outside}/b.jpg", f"../{outside.name}/c.jpg"):
            entry = tarfile.TarInfo(name)
            entry.size = len(JPG)
            tar.addfile(entry, io.BytesIO(JPG))
        for name, data in (("4.jpg", JPG), ("4.txt", b"a thing")):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return file.getvalue()


def files_with(text: str, folder: Path) -> list[Path]:
    return [
        path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()
    ]


def test_links_and_names_that_leave_a_tar(canary: Canary, tars: Tars, tmp_path: Path) -> None:
    data = escaping(canary)
    fooled = tmp_path / "fooled"
    fooled.mkdir()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar.getmembers():
            if not member.islnk():
                tar.extract(member, fooled, filter="fully_trusted")
    canary.shows((fooled / "1.txt").read_text() == canary.secret)
    written = sorted(path.name for path in canary.trace.iterdir())
    canary.shows(written == ["a.jpg", "b.jpg"])
    shutil.rmtree(canary.trace)
    shutil.rmtree(fooled)
    (tars.folder / "a.tar").write_bytes(data)
    out = tmp_path / "out"
    keys, refused = prepare(tars, out)
    assert keys == ["web/a/4"]
    # `up/...` is a name like any other where links are never made: a sample without text.
    assert sorted(row["reason"] for row in refused) == ["malformed_row"] + ["unsafe_member"] * 5
    assert not files_with(canary.secret, out)


def first_of(manifest: Any) -> Any:
    return next(each for each in manifest.shards if each.split == "train")


def with_first(manifest: Any, changed: Any) -> Any:
    first = first_of(manifest)
    shards = tuple(changed if each is first else each for each in manifest.shards)
    return manifest.model_copy(update={"shards": shards})


def poison(folder: Path, *, manifest: Any, change: Callable[[bytes], bytes]) -> Any:
    """Change a shard's tar, and let the manifest have its size and hash."""
    first = first_of(manifest)
    path = folder / first.path
    path.write_bytes(change(path.read_bytes()))
    poisoned = first.model_copy(
        update={"num_bytes": path.stat().st_size, "sha256": sha256_file(path)}
    )
    return with_first(manifest, poisoned)


def test_members_added_to_our_shards(canary: Canary, corpus: Any, tmp_path: Path) -> None:
    canary.proves(lambda: autodecode.decoders["pkl"](canary.pickled))
    shutil.copytree(corpus.shards, tmp_path / "shards")

    def add(data: bytes) -> bytes:
        file = io.BytesIO(data)
        with tarfile.open(fileobj=file, mode="a") as tar:
            entry = tarfile.TarInfo("digits/0.pkl")
            entry.size = len(canary.pickled)
            tar.addfile(entry, io.BytesIO(canary.pickled))
        return file.getvalue()

    manifest = poison(tmp_path / "shards", manifest=corpus.manifest, change=add)
    reader = ShardReader(tmp_path / "shards", manifest=manifest, split="train")
    assert len([reader.read(row) for row in range(len(reader))]) == 80


def test_a_pickle_in_the_place_of_a_sample(canary: Canary, corpus: Any, tmp_path: Path) -> None:
    canary.proves(lambda: pickle.loads(canary.pickled))
    shutil.copytree(corpus.shards, tmp_path / "shards")

    def replace(data: bytes) -> bytes:
        at = data.index(b'{"', 512)
        return data[:at] + canary.pickled + data[at + len(canary.pickled) :]

    manifest = poison(tmp_path / "shards", manifest=corpus.manifest, change=replace)
    reader = ShardReader(tmp_path / "shards", manifest=manifest, split="train")
    refused = []
    for row in range(len(reader)):
        try:
            reader.read(row).check()
        except DiptychError as error:
            refused.append(str(error))
    assert len(refused) == 1


@pytest.mark.parametrize("place", ["link", "dots", "absolute"])
def test_a_manifest_that_names_what_lies_outside(
    canary: Canary, corpus: Any, tmp_path: Path, place: str
) -> None:
    shards = tmp_path / "shards"
    shutil.copytree(corpus.shards, shards)
    first = first_of(corpus.manifest)
    outside = tmp_path / "outside.tar"
    (shards / first.path).rename(outside)
    named = {"link": first.path, "dots": "../outside.tar", "absolute": str(outside)}[place]
    if place == "link":
        (shards / first.path).symlink_to(outside)
    canary.shows((shards / named).stat().st_size == first.num_bytes)
    poisoned = first.model_copy(update={"path": named})
    manifest = with_first(corpus.manifest, poisoned)
    with pytest.raises(FormatError, match="leaves the folder"):
        ShardReader(shards, manifest=manifest, split="train").read(0)
