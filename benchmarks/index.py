"""Tars of JPEG (90 kB) and JSON to a checked index with image sizes and hashes, warm, one process.

- ours: the whole node `index`: headers of tars and images, hashes, JSON, rows, splits, Parquet.
- tarfile and Pillow: what a script does: `tarfile`'s members, `Image.open` for sizes, `json.load`.
- webdataset: the same over `webdataset.WebDataset`'s samples.
- tarfile alone: its members' names and places, nothing of their content.

The peers check, hash and write nothing. The tars are plain USTAR; those of webdataset's own writer,
with a PAX header before every member, are measured too and stand in the raw figures. CPU seconds,
user and system, one thread; all take turns, one pass over all samples a turn, after a first pass.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import webdataset
from PIL import Image

from _corpus import NUM_BASES, photograph
from diptych.core.records import RawPart, RawSamples, RawSource
from diptych.data.indexing.index import IndexParams, index
from run import Measured

GOAL = 15_000
NUM_ROUNDS = 5
NUM_TARS = 4
NUM_SAMPLES_PER_TAR = 1_000


def measure(options: argparse.Namespace) -> Measured:
    """Run all in turns over both kinds of tars."""
    bases = [photograph(seed) for seed in range(NUM_BASES)]
    with tempfile.TemporaryDirectory(prefix="diptych-index-") as name:
        rates = {}
        for kind, format in (("ustar", tarfile.USTAR_FORMAT), ("pax", tarfile.PAX_FORMAT)):
            folder = Path(name) / kind
            folder.mkdir()
            for number in range(NUM_TARS):
                path = folder / f"{number:06d}.tar"
                write_tar(path, number=number, format=format, bases=bases)
            rates[kind] = _take_turns(folder)
    medians = {
        kind: {peer: statistics.median(found) for peer, found in each.items()}
        for kind, each in rates.items()
    }
    peers = dict(medians["ustar"])
    ours = peers.pop("ours")
    return Measured(
        unit="samples per CPU-second",
        ours=ours,
        peers=peers,
        ratio=ours / GOAL,
        goal=f"at least {GOAL:,} samples per CPU-second",
        met=ours >= GOAL,
        raw={"rates": rates, "medians": medians},
    )


def write_tar(path: Path, *, number: int, format: int, bases: list[bytes]) -> None:
    """Write samples of one photograph each; every file has a comment of its own."""
    with tarfile.open(path, "w", format=format) as tar:
        for place in range(NUM_SAMPLES_PER_TAR):
            key = f"{number * NUM_SAMPLES_PER_TAR + place:08d}"
            data = bases[place % NUM_BASES]
            image = data[:2] + b"\xff\xfe\x00\x0a" + key.encode() + data[2:]
            question = "<image>\nWhat is in this picture?"
            answer = f"This is photograph {key}. It shows a thing on a table, in soft light."
            turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
            text = json.dumps({"id": key, "conversations": turns}).encode()
            for suffix, content in (("jpg", image), ("json", text)):
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(content)
                # A fraction of a second is what makes webdataset's writer need PAX.
                member.mtime = 1_700_000_000.25 if format == tarfile.PAX_FORMAT else 1_700_000_000
                tar.addfile(member, io.BytesIO(content))


def _take_turns(folder: Path) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {name: [] for name in _READERS}
    for number in range(NUM_ROUNDS + 1):
        for name, reader in _READERS.items():
            began = time.process_time()
            reader(folder)
            spent = time.process_time() - began
            if number:
                rates[name].append(NUM_TARS * NUM_SAMPLES_PER_TAR / spent)
    return rates


def index_ours(folder: Path) -> None:
    """Run the node."""
    parts = tuple(
        RawPart(path=path.name, num_bytes=path.stat().st_size, stamp="stat:0")
        for path in sorted(folder.glob("*.tar"))
    )
    root = str(folder)
    source = RawSource(name="web", kind="webdataset", root=root, images=root, parts=parts)
    params = IndexParams(num_processes=1, max_quarantined_fraction=0)
    _, quarantine = index(RawSamples(sources=(source,)), params, str(folder / "sample_index"))
    assert quarantine.num_rows == 0, "nothing is wrong with the samples"


def index_tarfile(folder: Path) -> None:
    """Read sizes and texts with the standard library and Pillow."""
    sizes, texts = [], []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None, "every member is a file"
                if member.name.endswith(".jpg"):
                    with Image.open(file) as image:
                        sizes.append(image.size)
                else:
                    texts.append(json.load(file))
    assert len(sizes) == len(texts) == NUM_TARS * NUM_SAMPLES_PER_TAR, "all were read"


def index_webdataset(folder: Path) -> None:
    """Read sizes and texts with webdataset and Pillow."""
    sizes, texts = [], []
    paths = [str(path) for path in sorted(folder.glob("*.tar"))]
    for sample in webdataset.WebDataset(paths, shardshuffle=False):
        with Image.open(io.BytesIO(sample["jpg"])) as image:
            sizes.append(image.size)
        texts.append(json.loads(sample["json"]))
    assert len(sizes) == NUM_TARS * NUM_SAMPLES_PER_TAR, "all were read"


def walk_tarfile(folder: Path) -> None:
    """List the members with the standard library."""
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            assert len(tar.getmembers()) == 2 * NUM_SAMPLES_PER_TAR, "all were listed"


_READERS: dict[str, Callable[[Path], None]] = {
    "ours": index_ours,
    "tarfile and Pillow": index_tarfile,
    "webdataset": index_webdataset,
    "tarfile alone": walk_tarfile,
}
