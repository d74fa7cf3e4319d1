"""A run that was killed goes on from the finished shards and ends with the same bytes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diptych.core.hashing import sha256_folder
from tests.data.indexed import Indexed

RUN = """
import sys
from pathlib import Path
from diptych.core.records import RawSamples
from diptych.core.tables import QUARANTINE
from diptych.data.shards.shard import ShardParams, shard

if __name__ == "__main__":
    index, raw_samples, out, num_processes = sys.argv[1:]
    shard(
        Path(index),
        RawSamples.model_validate_json(Path(raw_samples).read_text()),
        QUARANTINE.empty_table(),
        ShardParams(max_samples=20, num_processes=int(num_processes)),
        out,
    )
"""
NUM_SHARDS = 45


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """900 samples of 40 kB, and the script that shards them."""
    root = tmp_path_factory.mktemp("faults")
    indexed = Indexed(root / "raw")
    rng = random.Random(0)
    for number in range(900):
        split = "heldout" if number >= 700 else "train"
        indexed.add(f"id-{number}", rng.randbytes(40_000), split=split, answer=str(number))
    sample_index, raw_samples = indexed.write(part_rows=333)
    (root / "raw.json").write_text(raw_samples.model_dump_json())
    (root / "run.py").write_text(RUN)
    return root, sample_index, root / "raw.json"


def start(corpus: tuple[Path, Path, Path], *, out: Path, num_processes: int) -> subprocess.Popen:
    root, sample_index, raw_samples = corpus
    command = [sys.executable, root / "run.py", sample_index, raw_samples, out, str(num_processes)]
    return subprocess.Popen(command)


def kill_at(process: subprocess.Popen, *, out: Path, num_tars: int, after_s: float) -> None:
    """Kill a run a while after so many tars were there."""
    while process.poll() is None and len(list(out.rglob("*.tar"))) < num_tars:
        time.sleep(0.001)
    time.sleep(after_s)
    process.kill()
    assert process.wait(30) in (0, -signal.SIGKILL)


def check(corpus, out: Path, *, num_kills: int, num_processes: int, seed: int) -> None:
    rng = random.Random(seed)
    died = 0
    for number in range(num_kills):
        process = start(corpus, out=out, num_processes=num_processes)
        target = NUM_SHARDS * (number + rng.random()) / num_kills
        kill_at(process, out=out, num_tars=int(target), after_s=rng.random() * 0.02)
        died += process.returncode == -signal.SIGKILL
    assert died
    finished = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
    process = start(corpus, out=out, num_processes=num_processes)
    assert process.wait(120) == 0
    kept = {path: path.stat().st_mtime_ns for path in finished}
    assert kept == finished
    whole = corpus[0] / "whole"
    if not whole.exists():
        assert start(corpus, out=whole, num_processes=1).wait(120) == 0
    assert len(list(whole.rglob("*.tar"))) == NUM_SHARDS
    assert sha256_folder(out) == sha256_folder(whole)


def test_killed_in_the_middle(corpus: tuple[Path, Path, Path], tmp_path: Path) -> None:
    check(corpus, tmp_path / "out", num_kills=1, num_processes=1, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_killed_again_and_again(
    corpus: tuple[Path, Path, Path], tmp_path: Path, num_processes: int
) -> None:
    check(
        corpus,
        tmp_path / "out",
        num_kills=8 // num_processes,
        num_processes=num_processes,
        seed=num_processes,
    )
