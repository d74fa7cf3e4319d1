"""Schedule ten million samples: memory, time to the first batch, time to resume at 90%.

A made-up `sample_costs` folder of 1,000 shards is scheduled as a rank does it, each case in a
process of its own, so that its peak memory and its time are its alone: load the costs, draw the
first batch; the same, and draw batch 90%; draw all batches of an epoch. Both modes. There is no
peer: streaming and Energon know no packed rows and hold the corpus's order in memory or on disk.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from _costs import make_table, write_costs
from diptych.core.files import write_text
from diptych.core.records import Buckets, ScheduleSpec
from diptych.data.costs import load_costs
from diptych.data.schedule.schedule import Schedule
from diptych.data.shards.manifest import load_manifest
from run import Measured

NUM_SHARDS = 1_000
SAMPLES_PER_SHARD = 10_000
MAX_BYTES = 2**30
FIRST_S = 10.0
RESUME_S = 15.0
NUM_ROUNDS = 5
SPEC = {"global_batch": 1_024, "group": 8, "max_row_tokens": 8_192}
BUCKETS = Buckets(areas_px=(250_000, 1_000_000), aspects=(0.75, 1.5))
MODES = ("bucket", "pack")


def measure(options: argparse.Namespace) -> Measured:
    """Time the first batch and the resumed one in rounds; draw one whole epoch per mode."""
    del options
    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder:
        write_index(Path(folder))
        raw: dict[str, list[dict[str, float]]] = {}
        for _ in range(NUM_ROUNDS):
            for mode in MODES:
                for case in ("first", "resume"):
                    found = run_case(Path(folder), mode=mode, case=case)
                    raw.setdefault(f"{mode}_{case}", []).append(found)
        for mode in MODES:
            raw[f"{mode}_epoch"] = [run_case(Path(folder), mode=mode, case="epoch")]
    medians = {
        name: float(np.median([found["wall_s"] for found in rounds]))
        for name, rounds in raw.items()
    }
    peak = max(found["peak_bytes"] for rounds in raw.values() for found in rounds)
    first = max(medians[f"{mode}_first"] for mode in MODES)
    resume = max(medians[f"{mode}_resume"] for mode in MODES)
    return Measured(
        unit="s to the first batch",
        ours=first,
        peers={},
        ratio=resume,
        goal=f"first batch within {FIRST_S:g} s, resume at 90% (ratio) within {RESUME_S:g} s, "
        "peak memory of an epoch within 1 GiB",
        met=first <= FIRST_S and resume <= RESUME_S and peak <= MAX_BYTES,
        raw={"peak_bytes": peak, "medians_s": medians, **raw},
    )


def write_index(folder: Path) -> None:
    """Write a manifest and the costs of its shards."""
    rng = np.random.default_rng(0)
    sources = ("captions", "documents", "charts")
    tables = (
        (sources[number % 3], draw_costs(rng, text_scale=4.5 + number % 3))
        for number in range(NUM_SHARDS)
    )
    manifest = write_costs(folder / "costs", tables=tables)
    write_text(folder / "manifest.json", text=manifest.model_dump_json())


def draw_costs(rng: np.random.Generator, *, text_scale: float) -> pa.Table:
    """Draw one shard's costs: skewed text lengths, and images of none to twelve tiles."""
    num_tiles = rng.integers(0, 13, SAMPLES_PER_SHARD)
    text = np.minimum(rng.lognormal(text_scale, 0.8, SAMPLES_PER_SHARD), 4_000)
    return make_table(
        256 * num_tiles + text + 8,
        num_patches=1_024 * num_tiles,
        aspect=rng.uniform(0.3, 3, SAMPLES_PER_SHARD),
    )


def run_case(folder: Path, *, mode: str, case: str) -> dict[str, float]:
    """Run one case in a new process."""
    command = [sys.executable, __file__, str(folder), mode, case]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def main(folder: str, mode: str, case: str) -> None:
    """Schedule as a rank does, and print what it took, imports left out."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    manifest = load_manifest(Path(folder, "manifest.json"))
    costs = load_costs(Path(folder, "costs"), manifest=manifest, split="train")
    spec = ScheduleSpec.model_validate({**SPEC, "mode": mode})
    schedule = Schedule(costs, buckets=BUCKETS, spec=spec)
    if case == "first":
        schedule.weigh(schedule.rows(0, 0))
    if case == "resume":
        number = NUM_SHARDS * SAMPLES_PER_SHARD // spec.global_batch
        if mode == "pack":
            number = int(costs.totals.num_tokens / spec.max_row_tokens / spec.global_batch)
        schedule.weigh(schedule.rows(0, int(0.9 * number)))
    num_seen, number = 0, 0
    while case == "epoch":
        rows = schedule.rows(0, number)
        schedule.weigh(rows)
        num_seen += len(rows.samples)
        if schedule.is_last(0, number):
            break
        number += 1
    assert case != "epoch" or num_seen == costs.num_samples, "every sample once"
    found = {
        "wall_s": time.perf_counter() - began_s,
        "cpu_s": time.process_time() - began_cpu_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "num_steps": number + 1,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
