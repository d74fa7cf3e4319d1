"""Index and shards on a Ray cluster against processes of this machine, two workers each.

Peer: the same functions with two local processes. Both take the same `NUM_SAMPLES` samples, each an
image of about 90 kB and a conversation in LLaVA's form, and leave the same bytes, which is checked.
The cluster is one node of this machine with two cores, and runs already: its start is measured by
itself (`cluster_start_s`), for on a cluster nobody waits for that. Everything after it counts: each
stage joins the cluster, has its workers started, which import what they need, and leaves. The
peer's processes are started anew for each stage, too. The files are in the page cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prepare import make_samples
from run import Measured

NUM_SAMPLES = 120_000
NUM_PROCESSES = 2
NUM_ROUNDS = 3
SHARD_SAMPLES = 500
_GOAL = 0.9


def measure(options: argparse.Namespace) -> Measured:
    """Prepare the same samples both ways, in turns."""
    from diptych.core.ray import ray_folder
    from diptych.data.executor import LOCAL, ExecutorParams

    with tempfile.TemporaryDirectory(prefix="diptych-prepare-") as folder, ray_folder() as ours:
        root = Path(folder)
        num_bytes = make_samples(root / "raw", num_samples=NUM_SAMPLES)
        begin = time.perf_counter()
        with _cluster(ours) as address:
            start_s = time.perf_counter() - begin
            executors = {"ray": ExecutorParams(kind="ray", address=address), "local": LOCAL}
            rounds: dict[str, list[float]] = {name: [] for name in executors}
            manifests = set()
            for number in range(NUM_ROUNDS):
                # Who goes first changes.
                for name in sorted(executors, reverse=number % 2 == 1):
                    begin = time.perf_counter()
                    manifests.add(_prepare(root, executor=executors[name]))
                    rounds[name].append(time.perf_counter() - begin)
                    shutil.rmtree(root / "out")
    assert len(manifests) == 1, "both make the same bytes"
    per_s = {name: NUM_SAMPLES / statistics.median(spent) for name, spent in rounds.items()}
    ratio = per_s["ray"] / per_s["local"]
    return Measured(
        unit="samples/s",
        ours=per_s["ray"],
        peers={"local_processes": per_s["local"]},
        ratio=ratio,
        goal=f"on Ray at least {_GOAL} of what as many local processes do, the same bytes",
        met=ratio >= _GOAL,
        raw={
            "num_samples": NUM_SAMPLES,
            "image_bytes": num_bytes,
            "num_processes": NUM_PROCESSES,
            "seconds": rounds,
            "cluster_start_s": start_s,
        },
    )


def _prepare(root: Path, *, executor: Any) -> str:
    """Index and shard; return the hash of what came of it."""
    from diptych.data.indexing.index import IndexParams, index
    from diptych.data.shards.shard import ShardParams, shard
    from diptych.data.sources import SourceParams, gather

    source = SourceParams(kind="llava", path=str(root / "raw" / "samples.json"), split="train")
    raw_samples = gather({"photos": source})
    params = IndexParams(num_processes=NUM_PROCESSES)
    out = root / "out"
    sample_index, quarantine = index(raw_samples, params, str(out / "sample_index"), executor)
    _, manifest = shard(
        sample_index,
        raw_samples,
        quarantine,
        ShardParams(max_samples=SHARD_SAMPLES, num_processes=NUM_PROCESSES),
        str(out / "shards"),
        executor,
    )
    return manifest.sha256


@contextmanager
def _cluster(folder: Path) -> Iterator[str]:
    """Yield the address of a node with two cores, on loopback."""
    from diptych.core.ray import local_variables

    os.environ.update(local_variables())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = [f"--port={port}", f"--num-cpus={NUM_PROCESSES}", f"--temp-dir={folder}"]
    options += ["--include-dashboard=false", f"--object-store-memory={80 * 1024**2}"]
    program = Path(sys.executable).with_name("ray")
    node = subprocess.Popen(
        [program, "start", "--head", "--block", *options], stdout=subprocess.DEVNULL
    )
    try:
        _wait(port)
        yield f"127.0.0.1:{port}"
    finally:
        node.terminate()
        node.wait(60)


def _wait(port: int) -> None:
    """Wait until the node takes a driver."""
    from diptych.core.errors import RunError
    from diptych.core.ray import connected

    deadline = time.perf_counter() + 60
    while True:
        try:
            with connected(f"127.0.0.1:{port}"):
                return
        except RunError:
            if time.perf_counter() > deadline:
                raise
            time.sleep(0.2)
