"""What a resume costs against a cold start, and whether every layout resumes from every other.

Timed is one rank's process, from its start to its first step's record: imports, model, data, and
for a resume the newest checkpoint, verified and loaded. Cold and resumed in turns, a tiny model and
one of 100 MB (25 million weights, a checkpoint of 300 MB); the goal is about the worse of the two.

Then the cells of `tests/parallel/reshard.py`: a checkpoint of every layout is loaded by every
other, bit by bit, and trained on, against the single process that nothing ended. On two cores that
takes minutes.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _corpus import make_corpus
from diptych.core.records import (
    Identity,
    Layout,
    ModelSpec,
    OptimizerSpec,
    Placement,
    Provenance,
    RunSpec,
    ScheduleSpec,
)
from diptych.data.processor import read_processor_info
from diptych.monitor.run_folder import RunFolder
from run import Measured

GOAL, TOLERANCE = 1.5, 1e-6
NUM_ROUNDS = 5
NUM_STEPS, SAVED_AT = 4, 2
LIMIT_S = 300.0
ROOT = Path(__file__).resolve().parents[1]
WIDTHS = {"tiny": (64, 2), "100 MB": (512, 6)}
"""Width and number of decoder layers."""
_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 64,
}


def measure(options: argparse.Namespace) -> Measured:
    """Time both starts in turns, then run the cells."""
    seconds: dict[str, dict[str, list[float]]] = {}
    num_bytes = {}
    with tempfile.TemporaryDirectory(prefix="diptych-reshard-") as name:
        root = Path(name)
        corpus = make_corpus(root / "corpus", num_samples=0, num_text_only=256)
        manifest = corpus.shards.with_name("manifest.json")
        manifest.write_text(corpus.manifest.model_dump_json(), encoding="utf-8")
        for size in WIDTHS:
            seconds[size], num_bytes[size] = _time_starts(root, corpus=corpus, size=size)
        worst, num_passed, num_cells = _run_cells(root)
    medians = {
        size: {kind: statistics.median(values) for kind, values in kinds.items()}
        for size, kinds in seconds.items()
    }
    ratios = {size: each["resumed"] / each["cold"] for size, each in medians.items()}
    slower = max(ratios, key=lambda size: ratios[size])
    complete = num_passed == num_cells
    return Measured(
        unit=f"s to the first step's record, {slower} model",
        ours=medians[slower]["resumed"],
        peers={"cold_start": medians[slower]["cold"]},
        ratio=ratios[slower],
        goal=f"under {GOAL} times a cold start; every cell bit by bit and within {TOLERANCE:g} "
        f"(here {num_passed} of {num_cells}, worst {worst:.1e})",
        met=ratios[slower] < GOAL and complete,
        raw={
            "seconds": seconds,
            "ratios": ratios,
            "checkpoint_bytes": num_bytes,
            "cells_passed": num_passed,
            "cells_run": num_cells,
            "worst_relative_difference": worst,
        },
    )


def _time_starts(root: Path, *, corpus: Any, size: str) -> tuple[dict[str, list[float]], int]:
    spec = _spec(corpus, size=size)
    saved = RunFolder(root / size.replace(" ", "") / "saved")
    _train_and_save(saved, spec=spec)
    found: dict[str, list[float]] = {"cold": [], "resumed": []}
    for number in range(NUM_ROUNDS + 1):
        for kind in ("cold", "resumed") if number % 2 else ("resumed", "cold"):
            folder = RunFolder(saved.path.with_name(f"{kind}-{number}"))
            if kind == "resumed":
                shutil.copytree(saved.path, folder.path)
            taken = _time_start(folder, spec=spec)
            # The first round fills the page cache.
            found[kind] += [taken] if number else []
            shutil.rmtree(folder.path)
    files = saved.checkpoints.rglob("*.safetensors")
    return found, sum(path.stat().st_size for path in files)


def _train_and_save(folder: RunFolder, *, spec: RunSpec) -> None:
    """Leave a run as it is that was killed behind its first checkpoint."""
    placement = spec.placement.model_copy(update={"checkpoint_every_steps": SAVED_AT})
    with _rank(folder, spec=spec.model_copy(update={"placement": placement})) as check:
        while folder.newest_checkpoint() < SAVED_AT:
            check()
    for checkpoint in folder.checkpoints.glob("*"):
        if checkpoint.name != f"step-{SAVED_AT:08d}":
            shutil.rmtree(checkpoint)
    folder.finished.unlink(missing_ok=True)
    folder.cut_steps(SAVED_AT)


def _time_start(folder: RunFolder, *, spec: RunSpec) -> float:
    """Start a rank, end it by its first new record; return the seconds between."""
    before = len(folder.read_steps())
    began = time.perf_counter()
    with _rank(folder, spec=spec) as check:
        while len(folder.read_steps()) <= before:
            check()
        return time.perf_counter() - began


@contextmanager
def _rank(folder: RunFolder, *, spec: RunSpec) -> Iterator[Callable[[], None]]:
    """Start a rank of a world of one and yield what waits a moment; kill it in the end.

    Raises:
        RuntimeError: it failed, or takes too long.
    """
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_spec(spec)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {
        **os.environ,
        **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        **{"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    began = time.perf_counter()
    with (folder.path / "printed.log").open("wb") as log:
        command = [sys.executable, "-m", "diptych.worker", "train", str(folder.path)]
        rank = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)

    def check() -> None:
        if rank.poll() not in (None, 0) or time.perf_counter() - began > LIMIT_S:
            raise RuntimeError((folder.path / "printed.log").read_text(errors="replace"))
        time.sleep(0.005)

    try:
        yield check
    finally:
        rank.kill()
        rank.wait()


def _run_cells(root: Path) -> tuple[float, int, int]:
    """Load every layout's checkpoint on every other; return the worst, how many passed and ran."""
    sys.path.insert(0, str(ROOT))
    from tests.parallel.reshard import (
        LAYOUTS,
        REFERENCE,
        in_parts,
        load,
        relative,
        save,
        train_through,
    )
    from tests.ranks import RankPool

    pools = {size: RankPool(size) for size in {each.world_size for each in LAYOUTS.values()}}
    folders = {name: root / name.replace(" ", "") / "step-00000003" for name in LAYOUTS}
    try:
        (through,) = pools[LAYOUTS[REFERENCE].world_size].run(train_through)
        saved = {
            name: pools[layout.world_size].run(save, layout=layout, folder=folders[name])[0]
            for name, layout in LAYOUTS.items()
        }
        worst, num_passed = 0.0, 0
        for after, layout in LAYOUTS.items():
            found = {}
            for part in in_parts(folders):
                found |= pools[layout.world_size].run(load, layout=layout, folders=part)[0]
            for before, went in found.items():
                apart = max(
                    relative(went.gradient, through.gradient),
                    relative(went.ended.weights, through.ended.weights),
                )
                same = went.begun.digests == saved[before].begun.digests and (
                    before != after or went.ended.digests == saved[before].ended.digests
                )
                worst = max(worst, apart)
                num_passed += same and apart <= TOLERANCE
    finally:
        for pool in pools.values():
            pool.close()
    return worst, num_passed, len(LAYOUTS) ** 2


def _spec(corpus: Any, *, size: str) -> RunSpec:
    info = read_processor_info(corpus.processor)
    width, depth = WIDTHS[size]
    text = {
        "vocab_size": -(-info.tokens.num_tokens // 64) * 64,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": depth,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": width // 8,
    }
    return RunSpec(
        identity=Identity(
            manifest_sha256=corpus.manifest.sha256,
            processor_sha256=info.sha256,
            model=ModelSpec(family="qwen3_vl", sizes={"text": text, "vision": _VISION}),
            schedule=ScheduleSpec(global_batch=4, group=4),
            buckets=corpus.buckets,
            optimizer=OptimizerSpec(warmup_steps=1),
            num_steps=NUM_STEPS,
            seed=0,
        ),
        placement=Placement(
            layout=Layout(micro_batch=4),
            num_workers=0,
            threads_per_rank=1,
            log_every_steps=1,
            checkpoint_every_steps=0,
            checkpoint_min_interval_s=0.0,
            keep_checkpoints=2,
            heldout_every_steps=0,
            heldout_max_samples=0,
            max_restarts=0,
            shards=str(corpus.shards),
            manifest=str(corpus.shards.with_name("manifest.json")),
            sample_costs=str(corpus.sample_costs),
            processor=str(corpus.processor),
        ),
        provenance=Provenance(git_commit=None, git_dirty=None, source_sha256="bench", versions={}),
    )
