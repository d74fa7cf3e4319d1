"""From image files to shards that can be read at random, and what damaged input does to that.

Peer: tars written by webdataset's `TarWriter`, then `energon prepare` on them. Both start cold, use
two processes and take the same `NUM_SAMPLES` samples: an image of about 90 kB and a conversation
in LLaVA's form. Ours is more work: besides the tars and Energon's own index files it hashes and
measures every image, looks for duplicates and leaks, and leaves a manifest of hashes. The images
are `NUM_BASES` photographs, each file with a comment of its own, so that no two are equal. The wall
time of a whole preparation is compared, with the files in the page cache.

Then each damage is done to one of four tars, and both prepare the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _corpus import photograph
from _peers import peer_python
from _preparing import NUM_PROCESSES
from run import Measured

NUM_SAMPLES = 20_000
NUM_BASES = 8
NUM_ROUNDS = 5
_TARS, _TAR_SAMPLES = 4, 100
_SCRIPT = Path(__file__).with_name("_preparing.py")


def measure(options: argparse.Namespace) -> Measured:
    """Prepare the same samples both ways, in turns, and then damaged ones."""
    energon = peer_python("energon").with_name("energon")
    with tempfile.TemporaryDirectory(prefix="diptych-prepare-") as folder:
        root = Path(folder)
        num_bytes = make_samples(root / "raw")
        commands = {
            "ours": _command("ours", root=root),
            "webdataset": _command("webdataset", root=root),
            "energon_prepare": _energon(energon, folder=root / "webdataset"),
        }
        rounds: dict[str, list[float]] = {name: [] for name in commands}
        cpu_rounds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(NUM_ROUNDS):
            for name, command in commands.items():
                wall_s, cpu_s = _timed(command)
                rounds[name].append(wall_s)
                cpu_rounds[name].append(cpu_s)
            shutil.rmtree(root / "ours")
            shutil.rmtree(root / "webdataset")
        damage = {name: _damaged(root / name, name=name, energon=energon) for name in DAMAGES}
    peers = [
        first + second
        for first, second in zip(rounds["webdataset"], rounds["energon_prepare"], strict=True)
    ]
    ours, theirs = statistics.median(rounds["ours"]), statistics.median(peers)
    survived = all(found["ours"]["went_on"] for found in damage.values())
    return Measured(
        unit="s",
        ours=ours,
        peers={
            "webdataset_and_energon_prepare": theirs,
            "webdataset": statistics.median(rounds["webdataset"]),
            "energon_prepare": statistics.median(rounds["energon_prepare"]),
        },
        ratio=theirs / ours,
        goal="webdataset's writer and `energon prepare` take at least 1.0 times our wall time, and "
        "ours goes on at every damage",
        met=theirs >= ours and survived,
        raw={
            "num_samples": NUM_SAMPLES,
            "image_bytes": num_bytes,
            "num_processes": NUM_PROCESSES,
            "seconds": rounds,
            "cpu_seconds": cpu_rounds,
            "damage": damage,
        },
    )


def make_samples(folder: Path, *, num_samples: int = NUM_SAMPLES) -> int:
    """Write images and their annotations; return the images' bytes together."""
    (folder / "images").mkdir(parents=True)
    bases = [photograph(seed) for seed in range(NUM_BASES)]
    rows, total = [], 0
    for number in range(num_samples):
        data = _with_comment(bases[number % NUM_BASES], comment=b"%08d" % number)
        path = f"images/{number:08d}.jpg"
        (folder / path).write_bytes(data)
        total += len(data)
        turns = [
            {"from": "human", "value": "<image>\nWhat is in this picture?"},
            {"from": "gpt", "value": f"This is photograph {number}. " + "It shows a thing. " * 20},
        ]
        rows.append({"id": f"{number:08d}", "image": path, "conversations": turns})
    (folder / "samples.json").write_text(json.dumps(rows))
    return total


def _with_comment(data: bytes, *, comment: bytes) -> bytes:
    """Put a comment after a JPEG's first marker."""
    return data[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + data[2:]


def _command(role: str, *, root: Path) -> list[str]:
    return [sys.executable, str(_SCRIPT), role, str(root / "raw"), str(root / role)]


def _energon(energon: Path, *, folder: Path, options: tuple[str, ...] = ()) -> list[str]:
    options = ("--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset", *options)
    workers = ("--num-workers", str(NUM_PROCESSES), "--no-progress")
    return [str(energon), "prepare", "--non-interactive", *workers, *options, str(folder)]


def _timed(command: list[str]) -> tuple[float, float]:
    """Run a command; return its wall time and what it and its children took of the cores."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    wall_s, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall_s, cpu_s


def _cut_tar(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty_tar(path: Path) -> None:
    with tarfile.open(path, "w"):
        pass


def _cut_image(path: Path) -> None:
    """Write the tar again with the image of its middle sample cut in half."""
    with tarfile.open(path) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar]
    middle = len(members) // 2 // 2 * 2
    with tarfile.open(path, "w") as tar:
        for number, (member, data) in enumerate(members):
            content = data[: len(data) // 2] if number == middle else data
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


DAMAGES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "truncated_tar": (_cut_tar, ()),
    "empty_shard": (_empty_tar, ()),
    # Energon looks into images when it is asked for their sizes, which ours always knows.
    "truncated_jpeg": (_cut_image, ("--media-metadata-by-extension",)),
}


def _damaged(folder: Path, *, name: str, energon: Path) -> dict[str, Any]:
    """Damage the second of four tars and have both prepare the folder."""
    damage, options = DAMAGES[name]
    folder.mkdir()
    data = photograph(0)
    for number in range(_TARS):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for place in range(_TAR_SAMPLES):
                key = f"{number}-{place:04d}"
                _add(tar, f"{key}.jpg", data=_with_comment(data, comment=key.encode()))
                _add(tar, f"{key}.txt", data=f"Photograph {key}".encode())
    damage(folder / "1.tar")
    ours = _prepare_damaged(folder)
    command = _energon(energon, folder=folder, options=options)
    done = subprocess.run(command, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).strip().splitlines()
    found = {"went_on": done.returncode == 0, "said": lines[-1] if lines else ""}
    return {"ours": ours, "energon_prepare": found}


def _add(tar: tarfile.TarFile, name: str, *, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def _prepare_damaged(folder: Path) -> dict[str, Any]:
    """Index and shard a folder of tars; say what was kept and what was refused why."""
    from diptych.core.errors import DiptychError
    from diptych.data.indexing.index import IndexParams, index
    from diptych.data.shards.shard import ShardParams, shard
    from diptych.data.sources import SourceParams, gather

    source = SourceParams(
        kind="webdataset", path=f"{folder}/*.tar", prompt="What is this?", split="train"
    )
    with contextlib.ExitStack() as stack:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            raw_samples = gather({"tars": source})
            params = IndexParams(max_quarantined_fraction=0.5)
            sample_index, quarantine = index(raw_samples, params, str(out / "sample_index"))
            _, manifest = shard(
                sample_index, raw_samples, quarantine, ShardParams(), str(out / "shards")
            )
        except DiptychError as error:
            return {"went_on": False, "said": str(error)}
    return {
        "went_on": True,
        "num_samples": manifest.num_samples("train"),
        "quarantined": manifest.quarantined,
    }
