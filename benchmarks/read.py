"""Samples of a JPEG of 90 kB and a JSON, warm in the page cache, to bytes in memory, undecoded.

All read the same tars and hand out the same bytes of every member; nothing is parsed.

- ours: `ShardReader.read_members`, in random order over all samples.
- webdataset: `webdataset.WebDataset`, in the tars' order, the fastest it knows.
- Energon: its loader over the folder as `energon prepare` leaves it, no decoder, in the tars' order
  up to its own slices; in its own environment, without worker processes.

CPU seconds, user and system, of the process that reads, one thread. Start-up is not counted: each
reads some samples first. The three take turns, one pass over all samples a turn.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import webdataset

from _corpus import Corpus, make_corpus
from _peers import peer_python
from diptych.data.shards.reader import ShardReader
from run import Measured

WEBDATASET_GOAL, ENERGON_GOAL = 10, 20
NUM_ROUNDS = 5
NUM_SAMPLES = 2_000
NUM_WARM = 100
_SCRIPT = Path(__file__).with_name("_reading.py")


def measure(options: argparse.Namespace) -> Measured:
    """Run all in turns."""
    python = peer_python("energon")
    with tempfile.TemporaryDirectory(prefix="diptych-read-") as name:
        corpus = make_corpus(Path(name), num_samples=NUM_SAMPLES)
        command = [str(python.with_name("energon")), "prepare", "--non-interactive"]
        command += ["--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset", "--no-progress"]
        subprocess.run([*command, str(corpus.shards)], check=True, capture_output=True)
        rounds = [
            {
                "ours": read_ours(corpus, seed=seed),
                "webdataset": read_webdataset(corpus),
                "energon": _read_energon(python, corpus=corpus),
            }
            for seed in range(NUM_ROUNDS)
        ]
    rates = {
        name: statistics.median(part[name][0] / part[name][1] for part in rounds)
        for name in rounds[0]
    }
    ours = rates.pop("ours")
    ratio, energon = ours / rates["webdataset"], ours / rates["energon"]
    return Measured(
        unit="samples per CPU-second",
        ours=ours,
        peers=rates,
        ratio=ratio,
        goal=f"at least {WEBDATASET_GOAL} times webdataset, and at least {ENERGON_GOAL} times "
        f"Energon (here {energon:.1f})",
        met=ratio >= WEBDATASET_GOAL and energon >= ENERGON_GOAL,
        raw={"samples_and_cpu_s": rounds, "to_energon": energon},
    )


def read_ours(corpus: Corpus, *, seed: int) -> tuple[int, float]:
    """Read every sample once in random order; return how many, and the CPU seconds."""
    reader = ShardReader(corpus.shards, manifest=corpus.manifest, split="train")
    order = list(range(reader.num_samples))
    random.Random(seed).shuffle(order)
    for row in order[:NUM_WARM]:
        reader.read_members(row)
    began = time.process_time()
    num_bytes = sum(len(data) for row in order for data in reader.read_members(row))
    spent = time.process_time() - began
    assert num_bytes > 80_000 * len(order), "whole images were read"
    return len(order), spent


def read_webdataset(corpus: Corpus) -> tuple[int, float]:
    """Read every sample once; return how many after the first ones, and the CPU seconds."""
    count, num_bytes, began = 0, 0, 0.0
    for sample in webdataset.WebDataset(corpus.tars, shardshuffle=False):
        count += 1
        if count == NUM_WARM:
            began = time.process_time()
        num_bytes += len(sample["0.jpg"]) + len(sample["json"])
    spent = time.process_time() - began
    assert num_bytes > 80_000 * count, "whole images were read"
    return count - NUM_WARM, spent


def _read_energon(python: Path, *, corpus: Corpus) -> tuple[int, float]:
    command = [str(python), str(_SCRIPT), str(corpus.shards), str(NUM_SAMPLES), str(NUM_WARM)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    count, spent = json.loads(done.stdout.splitlines()[-1])
    return count, spent
