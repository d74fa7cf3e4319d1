"""How long a loader takes to hand out its first batch: from zero, and within an epoch.

What is timed is all that a restarted rank does for its data: the costs' summary is read, the
schedule made, the loader made, the first batch read and put together. From zero, and resumed at 10,
50 and 90% of an epoch, in modes `bucket` and `pack`; the goal is about the slowest of them. Wall
time, in turns.

Then an epoch is read by 4 ranks, stopped at 30%, gone on with by 2 ranks to 70%, and finished by 4:
every rank through its own loader, the state through JSON. The digest of the sorted keys must be
that of the manifest's shards, so nothing was lost and nothing came twice.

The corpus is text alone: every batch takes the same time, so that only what resuming adds is seen.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from _corpus import Corpus, make_corpus
from diptych.core.records import LoaderState, ScheduleSpec
from diptych.data.costs import load_costs
from diptych.data.loader import Loader
from diptych.data.schedule.schedule import Schedule
from diptych.data.shards.reader import ShardReader
from run import Measured

GOAL = 1.5
NUM_ROUNDS = 6
NUM_SAMPLES = 6_000
PLACES = (0.0, 0.1, 0.5, 0.9)
SPECS = {
    "bucket": ScheduleSpec(global_batch=32, group=8, max_row_tokens=1024),
    "pack": ScheduleSpec(mode="pack", global_batch=8, max_row_tokens=1024),
}
WORLDS = ((4, 0.3), (2, 0.7), (4, 1.0))


def measure(options: argparse.Namespace) -> Measured:
    """Time all places in turns, then follow one epoch over changing worlds."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="diptych-resume-") as name:
        corpus = make_corpus(Path(name), num_samples=0, num_text_only=NUM_SAMPLES)
        steps = {mode: _schedule(corpus, spec=spec).num_steps(0) for mode, spec in SPECS.items()}
        seconds: dict[str, list[float]] = {}
        for _ in range(NUM_ROUNDS):
            for mode, place in itertools.product(SPECS, PLACES):
                taken = time_first_batch(corpus, mode=mode, step=int(place * steps[mode]))
                seconds.setdefault(f"{mode} at {place:.0%}", []).append(taken)
        digests = {mode: digest_of_epoch(corpus, mode=mode) for mode in SPECS}
        keys = ShardReader(corpus.shards, manifest=corpus.manifest, split="train").keys.to_pylist()
    expected = _digest(keys)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    ratios = {
        f"{mode} at {place:.0%}": medians[f"{mode} at {place:.0%}"] / medians[f"{mode} at 0%"]
        for mode, place in itertools.product(SPECS, PLACES[1:])
    }
    slowest = max(ratios, key=lambda name: ratios[name])
    complete = set(digests.values()) == {expected}
    mode = slowest.split()[0]
    return Measured(
        unit="s to the first batch",
        ours=medians[slowest],
        peers={"from_zero": medians[f"{mode} at 0%"]},
        ratio=ratios[slowest],
        goal=f"at most {GOAL} times a start from zero, and 0 samples lost or repeated over "
        f"4 -> 2 -> 4 ranks (here {'none' if complete else 'SOME'})",
        met=ratios[slowest] <= GOAL and complete,
        raw={
            "seconds": seconds,
            "ratios": ratios,
            "num_steps": steps,
            "digests": digests,
            "expected_digest": expected,
            "num_samples": len(keys),
        },
    )


def time_first_batch(corpus: Corpus, *, mode: str, step: int) -> float:
    """Make a loader at a step of the first epoch, and its first batch."""
    began = time.perf_counter()
    schedule = _schedule(corpus, spec=SPECS[mode])
    loader = _loader(corpus, schedule=schedule, state=LoaderState(step=step))
    batch = next(iter(loader))
    taken = time.perf_counter() - began
    assert batch.number == step
    return taken


def digest_of_epoch(corpus: Corpus, *, mode: str) -> str:
    """Read an epoch with worlds of changing size; digest the keys of what was in the batches."""
    keys = ShardReader(corpus.shards, manifest=corpus.manifest, split="train").keys.to_pylist()
    schedule = _schedule(corpus, spec=SPECS[mode])
    num_steps, state, seen = schedule.num_steps(0), LoaderState(), []
    for world_size, share in WORLDS:
        until = round(share * num_steps)
        states = set()
        for rank in range(world_size):
            options = {"rank": rank, "world_size": world_size, "state": state}
            loader = _loader(corpus, schedule=schedule, **options)
            for batch in itertools.islice(loader, until - state.step):
                assert not batch.masked_keys
                seen += [keys[number] for rows in batch.rows for number in rows.samples.tolist()]
            states.add(loader.state_dict().model_dump_json())
        (state_json,) = states
        state = LoaderState.model_validate_json(state_json)
    return _digest(seen)


def _schedule(corpus: Corpus, *, spec: ScheduleSpec) -> Schedule:
    costs = load_costs(corpus.sample_costs, manifest=corpus.manifest, split="train")
    return Schedule(costs, buckets=corpus.buckets, spec=spec)


def _loader(corpus: Corpus, *, schedule: Schedule, **options: Any) -> Loader:
    settings = {
        "shards": corpus.shards,
        "manifest": corpus.manifest,
        "processor": corpus.processor,
        "schedule": schedule,
        "split": "train",
        "rank": 0,
        "world_size": 1,
        "micro_batch": 2,
        "num_workers": 0,
    }
    return Loader(**{**settings, **options})


def _digest(keys: list[str]) -> str:
    """Digest keys with their repeats, in any order."""
    return hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()
