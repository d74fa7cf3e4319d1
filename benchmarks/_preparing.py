"""A preparation of the benchmark `prepare`, from a cold start: `python _preparing.py ROLE RAW OUT`.

ROLE `ours` gathers, indexes and shards, and adds Energon's files; `webdataset` writes tars as its
documentation shows. Both use two processes and the same samples.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

NUM_PROCESSES = 2
SHARD_SAMPLES = 500


def prepare_ours(raw: Path, *, out: Path) -> None:
    """Make shards, manifest and Energon's files."""
    from diptych.data.indexing.index import IndexParams, index
    from diptych.data.shards.energon import export_energon
    from diptych.data.shards.shard import ShardParams, shard
    from diptych.data.sources import SourceParams, gather

    source = SourceParams(kind="llava", path=str(raw / "samples.json"), split="train")
    raw_samples = gather({"photos": source})
    sample_index, quarantine = index(
        raw_samples, IndexParams(num_processes=NUM_PROCESSES), str(out / "sample_index")
    )
    params = ShardParams(max_samples=SHARD_SAMPLES, num_processes=NUM_PROCESSES)
    shards, manifest = shard(sample_index, raw_samples, quarantine, params, str(out / "shards"))
    export_energon(manifest, shards=shards, folder=out / "energon")


def prepare_webdataset(raw: Path, *, out: Path) -> None:
    """Write tars with webdataset's writer, a share of them in each process."""
    rows = json.loads((raw / "samples.json").read_text())
    shares = [rows[first : first + SHARD_SAMPLES] for first in range(0, len(rows), SHARD_SAMPLES)]
    out.mkdir(parents=True)
    tasks = [(raw, out / f"{number:06d}.tar", share) for number, share in enumerate(shares)]
    with multiprocessing.Pool(NUM_PROCESSES) as pool:
        pool.map(_write, tasks, chunksize=1)


def _write(task: tuple[Path, Path, list[dict[str, Any]]]) -> None:
    import webdataset

    raw, path, rows = task
    with webdataset.TarWriter(str(path)) as tar:
        for row in rows:
            image = (raw / row["image"]).read_bytes()
            tar.write({"__key__": row["id"], "jpg": image, "json": row})


if __name__ == "__main__":
    role = {"ours": prepare_ours, "webdataset": prepare_webdataset}[sys.argv[1]]
    role(Path(sys.argv[2]), out=Path(sys.argv[3]))
