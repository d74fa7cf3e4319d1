"""The promises of docs/architecture.md that cross folders; 2 and 3 have files of their own.

Promise 2: `tests/parallel/test_same_loss.py`. Promise 3: `tests/train/test_same_run.py`.
"""

from __future__ import annotations

import ast
import json
import pickle
import re
from pathlib import Path

import pytest
import torch

import diptych
from diptych.core.errors import DataError, FormatError, LayoutError
from diptych.core.records import Layout, LoaderState
from diptych.core.tables import read_parts
from tests.conftest import TINY_MODEL, TINY_PACKS, TINY_SCHEDULE
from tests.runs import make_spec, train_rank
from tests.security.canary import Bomb


def _keys(corpus, *, world_size, micro_batch, num_workers=0, num_steps=12, spec=TINY_SCHEDULE):
    """The sorted keys of every global batch, put together from all ranks' loaders."""
    from diptych.data.costs import load_costs
    from diptych.data.loader import Loader
    from diptych.data.schedule.schedule import Schedule
    from diptych.data.shards.reader import ShardReader

    costs = load_costs(corpus.sample_costs, manifest=corpus.manifest, split="train")
    schedule = Schedule(costs, buckets=corpus.buckets, spec=spec)
    keys = ShardReader(corpus.shards, manifest=corpus.manifest, split="train").keys
    batches = [[] for _ in range(num_steps)]
    for rank in range(world_size):
        loader = Loader(
            shards=corpus.shards,
            manifest=corpus.manifest,
            processor=corpus.processor,
            schedule=schedule,
            split="train",
            rank=rank,
            world_size=world_size,
            micro_batch=micro_batch,
            num_workers=num_workers,
            state=LoaderState(),
        )
        for number, batch in zip(range(num_steps), loader, strict=False):
            samples = [int(n) for rows in batch.rows for n in rows.samples]
            batches[number] += [str(keys[sample]) for sample in samples]
    return [sorted(batch) for batch in batches]


@pytest.mark.parametrize(
    ("world_size", "micro_batch"), [(2, 4), (3, 1), (4, 2), (1, 1), (5, 4)], ids=str
)
def test_promise_1_same_batches(world_size, micro_batch, corpus):
    expected = _keys(corpus, world_size=1, micro_batch=8)
    assert _keys(corpus, world_size=world_size, micro_batch=micro_batch) == expected
    # Ten steps are an epoch of 80 samples: each was seen once before the first came again.
    seen = [key for batch in expected[:10] for key in batch]
    assert len(seen) == len(set(seen)) == corpus.manifest.num_samples("train") == 80


@pytest.mark.parametrize(("world_size", "micro_batch"), [(2, 1), (4, 2), (5, 1)], ids=str)
def test_promise_1_same_batches_packed(world_size, micro_batch, corpus):
    expected = _keys(corpus, world_size=1, micro_batch=6, spec=TINY_PACKS)
    found = _keys(corpus, world_size=world_size, micro_batch=micro_batch, spec=TINY_PACKS)
    assert found == expected


def test_promise_1_same_batches_for_any_worker_count(corpus):
    expected = _keys(corpus, world_size=1, micro_batch=4, num_steps=4)
    found = _keys(corpus, world_size=1, micro_batch=4, num_steps=4, num_workers=2)
    assert found == expected


def test_promise_5_nothing_lost_in_silence(tmp_path):
    from diptych.data.indexing.index import IndexParams, index
    from diptych.data.sources import SourceParams, gather
    from diptych.data.sources.starter import build_starter

    raw = build_starter(tmp_path / "raw", num_train=60, num_heldout=10, seed=1)
    rows = json.loads((raw / "train.json").read_text())
    first = next(row for row in rows if isinstance(row.get("image"), str))
    (raw / first["image"]).unlink()
    rows[-1]["conversations"][-1]["value"] = " "
    (raw / "train.json").write_text(json.dumps(rows))
    raw_samples = gather({"digits": SourceParams(kind="starter", path=str(raw))})
    params = IndexParams(max_quarantined_fraction=0.5)
    folder, quarantine = index(raw_samples, params, str(tmp_path / "index"))
    reasons = sorted(quarantine["reason"].to_pylist())
    num_kept = sum(part.num_rows for part in read_parts(folder))
    assert num_kept + quarantine.num_rows == 70
    assert reasons == ["empty_answer", "missing_image"]
    with pytest.raises(DataError, match="missing_image"):
        index(raw_samples, IndexParams(), str(tmp_path / "again"))


def test_promise_6_same_again(corpus, ranks, tmp_path):
    from diptych.data.indexing.index import IndexParams, index
    from diptych.data.shards.shard import ShardParams, shard
    from diptych.data.sources import SourceParams, gather
    from diptych.monitor.run_folder import RunFolder
    from diptych.parallel import storage

    raw_samples = gather({"digits": SourceParams(kind="starter", path=str(corpus.raw))})
    table, quarantine = index(raw_samples, IndexParams(), str(tmp_path / "index"))
    _, manifest = shard(
        table, raw_samples, quarantine, ShardParams(max_samples=16), str(tmp_path / "shards")
    )
    assert manifest.sha256 == corpus.manifest.sha256
    for path in sorted(p for p in corpus.shards.rglob("*") if p.is_file()):
        again = tmp_path / "shards" / path.relative_to(corpus.shards)
        assert again.read_bytes() == path.read_bytes(), path.name
    weights = []
    for name in ("one", "two"):
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        spec = make_spec(
            corpus,
            layout=Layout(engine="ddp", dp=2, micro_batch=4),
            model=TINY_MODEL,
            schedule=TINY_SCHEDULE,
            num_steps=3,
        )
        folder.write_spec(spec)
        ranks(2).run(train_rank, folder=folder.path)
        newest = storage.list_checkpoints(folder.checkpoints)[-1]
        # The files differ: safetensors writes the keys of its header in random order.
        weights.append(storage.read_weights(newest))
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_promise_7_never_executes_data(corpus, ranks, tmp_path):
    from diptych.monitor.run_folder import RunFolder
    from diptych.parallel import storage

    canary = tmp_path / "executed"
    pickle.loads(pickle.dumps(Bomb(canary)))
    assert canary.is_dir(), "the canary must sing where a pickle is read"
    canary.rmdir()
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    spec = make_spec(
        corpus, layout=Layout(micro_batch=8), model=TINY_MODEL, schedule=TINY_SCHEDULE, num_steps=4
    )
    folder.write_spec(spec)
    ranks(1).run(train_rank, folder=folder.path, stop_at=3)
    newest = storage.list_checkpoints(folder.checkpoints)[-1]
    for name in (".metadata", "optimizer.pt", "state.pkl"):
        (newest / name).write_bytes(pickle.dumps(Bomb(canary)))
    with pytest.raises(FormatError, match="does not belong there"):
        storage.read_weights(newest)
    assert ranks(1).run(train_rank, folder=folder.path) == [4]
    assert not canary.exists()


def test_promise_7_no_code_that_executes_data():
    forbidden = re.compile(
        r"torch\.load\(|pickle\.loads?\(|Unpickler\b|allow_pickle=True|trust_remote_code=True"
        r"|yaml\.(unsafe_|full_)?load\(|\b(eval|exec)\(|marshal\.load|shelve\.|shell=True"
        r"|os\.(system|popen)\(|extractall\("
    )
    root = Path(diptych.__file__).parent
    # Reads other trainers' checkpoints, in a process that has given up what could do harm.
    reader = root / "model" / "foreign" / "pickles.py"
    for path in root.rglob("*.py"):
        text = re.sub(r"\.eval\(", "", path.read_text())
        assert path == reader or not forbidden.search(text), path
        if not path.is_relative_to(reader.parent):
            named = set(re.findall(r"model\.foreign\.(\w+)", text))
            assert named <= {"importing"}, path
    calls = [
        node
        for node in ast.walk(ast.parse(reader.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "pickle.load")
    ]
    assert {ast.unparse(call.func) for call in calls} == {"torch.load"}
    for call in calls:
        assert "weights_only=True" in [ast.unparse(each) for each in call.keywords]


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_promise_8_fails_early_and_clearly(axis):
    from diptych.parallel.mesh import build_mesh

    with pytest.raises(LayoutError, match=f"The axis {axis} of size 2 is not built yet"):
        build_mesh(Layout(engine="fsdp2", **{axis: 2}))
