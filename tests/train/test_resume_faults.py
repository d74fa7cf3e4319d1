"""Silent faults that other trainers had when they resumed, each asked for by its name.

Nobody fails in any of them: the run goes on, over the wrong data or from the wrong state.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter

import pytest
import torch

from diptych.core.records import Layout, LoaderState
from diptych.data.costs import load_costs
from diptych.data.loader import Loader
from diptych.data.schedule.schedule import Schedule
from diptych.monitor.run_folder import RunFolder
from diptych.parallel import storage
from diptych.train.checkpoints import note_masked_keys, read_masked_keys
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec, train_rank

NUM_STEPS, BORDER, NUM_SAMPLES = 13, 10, 80
SINGLE = Layout(micro_batch=4)
DDP = Layout(engine="ddp", dp=2, micro_batch=4)


def prepare(folder, *, corpus, layout, num_steps=NUM_STEPS):
    folder.path.mkdir(parents=True, exist_ok=True)
    spec = make_spec(
        corpus,
        layout=layout,
        model=TINY_MODEL,
        schedule=TINY_SCHEDULE,
        num_steps=num_steps,
        checkpoint_every_steps=3,
    )
    folder.write_spec(spec)


def train_and_note(folder, *, name, stop_at=None):
    """Train on this rank, noting the samples of every batch that it is handed."""
    from diptych import worker

    noting = worker._noting_masked

    def noted(loader, *, folder, world):
        with (folder.path / f"samples-{name}-{world.rank}.jsonl").open("w") as file:
            for batch in noting(loader, folder=folder, world=world):
                samples = [n for rows in batch.rows for n in rows.samples.tolist()]
                file.write(json.dumps([batch.step, batch.epoch, samples]) + "\n")
                file.flush()
                yield batch

    worker._noting_masked = noted
    try:
        return train_rank(folder, stop_at=stop_at)
    finally:
        worker._noting_masked = noting


def samples_by_step(folder, *, names):
    """(epoch, sorted samples) of each step; a later attempt's, where two were handed a step."""
    found = {}
    for name in names:
        steps = {}
        for path in folder.path.glob(f"samples-{name}-*.jsonl"):
            for step, epoch, samples in map(json.loads, path.read_text().splitlines()):
                steps.setdefault(step, (epoch, []))[1].extend(samples)
        found |= {step: (epoch, sorted(samples)) for step, (epoch, samples) in steps.items()}
    return found


@pytest.fixture(scope="module")
def through(ranks, corpus, tmp_path_factory):
    folder = RunFolder(tmp_path_factory.mktemp("faults") / "run")
    prepare(folder, corpus=corpus, layout=SINGLE)
    ranks(1).run(train_and_note, folder=folder.path, name="all")
    return folder


@pytest.fixture(scope="module")
def changed(ranks, corpus, tmp_path_factory):
    """A run on 2 ranks, then one up to an epoch's border, then 2 again."""
    folder = RunFolder(tmp_path_factory.mktemp("faults") / "run")
    for name, layout, stop_at in (("a", DDP, 4), ("b", SINGLE, BORDER), ("c", DDP, None)):
        prepare(folder, corpus=corpus, layout=layout)
        ranks(layout.world_size).run(train_and_note, folder=folder.path, name=name, stop_at=stop_at)
    return folder


def test_the_loader_state_is_not_only_saved_but_restored(through, changed):
    """The same samples in every step, each of them once in an epoch."""
    expected = samples_by_step(through, names=["all"])
    found = samples_by_step(changed, names=["a", "b", "c"])
    assert found == expected
    assert sorted(found) == list(range(NUM_STEPS))
    first = Counter(n for epoch, samples in found.values() if epoch == 0 for n in samples)
    assert first == dict.fromkeys(range(NUM_SAMPLES), 1)


def test_nothing_is_dropped_when_the_number_of_data_parallel_ranks_changes(through, changed):
    one, other = (
        storage.read_state(folder.checkpoints / f"step-{NUM_STEPS:08d}")
        for folder in (through, changed)
    )
    assert one["loader"] == other["loader"]
    assert one["num_updates"] == other["num_updates"] == NUM_STEPS
    # Moments that began anew would show in the weights: they moved by much more than this.
    weights, others = (
        storage.read_weights(folder.checkpoints / f"step-{NUM_STEPS:08d}")
        for folder in (through, changed)
    )
    assert weights.keys() == others.keys()
    whole, found = (
        torch.cat([each[name].flatten() for name in weights]) for each in (weights, others)
    )
    assert torch.linalg.vector_norm(found - whole) <= 1e-4 * torch.linalg.vector_norm(whole)


def test_an_epochs_border_does_not_resume_to_no_steps(changed):
    attempts = changed.read_attempts()
    assert [attempt["from_step"] for attempt in attempts] == [0, 4, BORDER]
    last = samples_by_step(changed, names=["c"])
    assert sorted(last) == list(range(BORDER, NUM_STEPS))
    assert last[BORDER][0] == 1, "the next epoch's first batch"
    assert [record.attempt for record in changed.read_steps()] == [0] * 4 + [1] * 6 + [2] * 3
    assert changed.read_run().num_steps == NUM_STEPS


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_no_ranks_loader_is_exhausted_before_the_others(corpus, world_size):
    """80 samples over three epochs: every rank has a batch in each step, resumed anywhere."""
    costs = load_costs(corpus.sample_costs, manifest=corpus.manifest, split="train")
    for start in (0, BORDER - 1, BORDER):
        loaders = [
            Loader(
                shards=corpus.shards,
                manifest=corpus.manifest,
                processor=corpus.processor,
                schedule=Schedule(costs, buckets=corpus.buckets, spec=TINY_SCHEDULE),
                split="train",
                rank=rank,
                world_size=world_size,
                micro_batch=1,
                num_workers=0,
                state=LoaderState(step=start),
            )
            for rank in range(world_size)
        ]
        steps = [[batch.step for batch in itertools.islice(each, 12)] for each in loaders]
        assert steps == [list(range(start, start + 12))] * world_size


def train_exhausted(folder):
    """Train with a loader that ends after three batches."""
    from diptych import worker

    make = worker.make_loader
    worker.make_loader = lambda *args, **kwargs: itertools.islice(make(*args, **kwargs), 3)
    try:
        return train_rank(folder)
    finally:
        worker.make_loader = make


def test_a_rank_that_is_exhausted_fails(corpus, tmp_path, ranks):
    folder = RunFolder(tmp_path / "run")
    prepare(folder, corpus=corpus, layout=SINGLE)
    with pytest.raises(AssertionError, match="this rank's has ended"):
        ranks(1).run(train_exhausted, folder=folder.path)
    assert folder.read_run() is None


_ONE_OF_TWO = """
import itertools, os, sys
from diptych import worker
make = worker.make_loader
if os.environ["RANK"] == "1":
    worker.make_loader = lambda *args, **kwargs: itertools.islice(make(*args, **kwargs), 3)
worker.main(["train", sys.argv[1]])
"""


@pytest.mark.slow
def test_one_exhausted_rank_of_two_ends_the_run_with_an_error(corpus, tmp_path):
    """Real processes: the other rank neither waits for ever nor calls the run finished."""
    folder = RunFolder(tmp_path / "run")
    prepare(folder, corpus=corpus, layout=DDP)
    script = tmp_path / "rank.py"
    script.write_text(_ONE_OF_TWO)
    elastic = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *elastic, str(script), str(folder.path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode != 0
    assert "this rank's has ended" in done.stderr
    assert folder.read_run() is None
    # The fourth batch is missed as the third step begins, in which the second gets its record.
    assert [record.step for record in folder.read_steps()] == [1]


def test_a_note_of_masked_samples_that_was_cut_off_stops_no_save(tmp_path):
    note_masked_keys(tmp_path, rank=0, step=3, keys=("a", "b"))
    path = tmp_path / "masked-0.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "ke')
    assert read_masked_keys(tmp_path) == ["a", "b"]
    note_masked_keys(tmp_path, rank=0, step=5, keys=("c",))
    assert read_masked_keys(tmp_path) == ["a", "b", "c"]
