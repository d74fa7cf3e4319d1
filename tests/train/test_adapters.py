"""Adapters train alike on every layout, and nothing else trains."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diptych.core.errors import ConfigError
from diptych.core.records import (
    Layout,
    LoraSpec,
    MemoryOptions,
    ModelSpec,
    OptimizerSpec,
    ZeroOptions,
)
from diptych.data.processor import read_processor_info
from diptych.model.assemble import build
from diptych.model.inspect import inspect
from diptych.model.revision import pin
from diptych.monitor.run_folder import RunFolder
from diptych.parallel import storage
from diptych.shape.adapters import is_adapter
from diptych.shape.groups import group_parameters
from diptych.train import compose
from diptych.train.compose import TrainParams
from diptych.train.optimizers import build_optimizer
from diptych.train.trains import what_trains, write_table
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec, train_rank, trajectory

NUM_STEPS = 4
LORA = LoraSpec(rank=4, towers=("vision", "language"))
LAYOUTS = {
    "ddp": Layout(engine="ddp", dp=2, micro_batch=4),
    "fsdp2": Layout(engine="fsdp2", shard=2, micro_batch=4),
    "zero 2": Layout(engine="zero", shard=2, micro_batch=4, zero=ZeroOptions(stage=2)),
    "zero 3": Layout(
        engine="zero",
        shard=2,
        micro_batch=4,
        zero=ZeroOptions(stage=3, persistence_threshold_elements=0),
    ),
    "recompute": Layout(
        engine="fsdp2", shard=2, micro_batch=4, memory=MemoryOptions(recompute="blocks")
    ),
}


def adapted(lora, **changes):
    return TINY_MODEL.model_copy(update={"lora": lora, **changes})


def run(corpus, ranks, *, layout, model):
    spec = make_spec(corpus, layout=layout, model=model, schedule=TINY_SCHEDULE, lr=1e-2)
    return ranks(layout.world_size).run(trajectory, spec=spec, num_steps=NUM_STEPS)[0]


@pytest.fixture(scope="module")
def alone(corpus, ranks):
    found = {}

    def get(lora):
        if lora not in found:
            found[lora] = run(corpus, ranks, layout=Layout(micro_batch=4), model=adapted(lora))
        return found[lora]

    return get


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_same_loss(corpus, ranks, alone, name, dora):
    lora = LORA.model_copy(update={"dora": dora})
    expected = alone(lora)
    found = run(corpus, ranks, layout=LAYOUTS[name], model=adapted(lora))
    distance = np.linalg.norm(found["gradient"] - expected["gradient"])
    assert distance <= 1e-6 * np.linalg.norm(expected["gradient"])
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-4)
    assert expected["losses"][-1] < expected["losses"][0]


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    """The weights that seed 0 draws, without adapters."""
    info = read_processor_info(corpus.processor)
    path = tmp_path_factory.mktemp("weights")
    build(TINY_MODEL, tokens=info.tokens, image=info.image, seed=0).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero 3"])
def test_weights_of_a_folder_get_the_same_adapters(corpus, ranks, folder, name):
    lora = LORA.model_copy(update={"dora": True})
    read = pin(ModelSpec(weights=str(folder), lora=lora))
    found = [
        run(corpus, ranks, layout=LAYOUTS[name], model=model) for model in (adapted(lora), read)
    ]
    assert np.array_equal(found[0]["losses"], found[1]["losses"])
    assert np.array_equal(found[0]["gradient"], found[1]["gradient"])


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero 3"])
def test_a_stopped_run_goes_on_exactly(corpus, ranks, tmp_path, name):
    lora = LoraSpec(rank=4, dropout=0.1)
    weights = {}
    for kind, stops in (("through", [None]), ("stopped", [2, None])):
        folder = RunFolder(tmp_path / kind)
        folder.path.mkdir()
        model = adapted(lora, freeze=("vision", "connector"))
        folder.write_spec(
            make_spec(corpus, layout=LAYOUTS[name], model=model, schedule=TINY_SCHEDULE, lr=1e-2)
        )
        for stop_at in stops:
            ranks(2).run(train_rank, folder=folder.path, stop_at=stop_at)
        steps = folder.read_steps()
        assert steps[-1].loss < steps[0].loss
        weights[kind] = storage.read_weights(folder.checkpoints / "step-00000006")
    assert weights["through"].keys() == weights["stopped"].keys()
    for tensor, expected in weights["stopped"].items():
        assert torch.equal(expected, weights["through"][tensor]), tensor
    # Nothing but adapters moved, or has a moment in the checkpoint.
    info = read_processor_info(corpus.processor)
    first = dict(build(model, tokens=info.tokens, image=info.image, seed=0).named_parameters())
    moved = {each for each in first if not torch.equal(first[each], weights["through"][each])}
    assert moved
    assert all(map(is_adapter, moved))
    stored = storage.stored_shapes(folder.checkpoints / "step-00000006")
    moments = [each for each in stored if each.startswith(storage.OPTIMIZER_PREFIX)]
    assert len(moments) == 2 * sum(map(is_adapter, first))
    assert all(map(is_adapter, moments))
    rows = {(row.tower, row.part, row.optimizer) for row in folder.read_what_trains().rows}
    assert rows == {
        ("vision", "weights", None),
        ("connector", "weights", None),
        ("language", "weights", None),
        ("language", "adapters", "adamw"),
    }


def test_features_need_a_tower_without_adapters(corpus):
    train = TrainParams(vision_features="features")
    for lora, said in ((LORA, "puts adapters that learn into it"), (LoraSpec(), None)):
        model = adapted(lora, freeze=("vision", "connector", "language"))
        if said is None:
            compose.check_freeze(model, train=train)
            continue
        with pytest.raises(ConfigError, match=said):
            compose.check_freeze(model, train=train)


def test_the_table_tells_adapters_apart(corpus):
    info = read_processor_info(corpus.processor)
    model = build(adapted(LoraSpec(rank=4)), tokens=info.tokens, image=info.image, seed=0)
    text = write_table(what_trains(model, optimizer=build_optimizer(model, spec=OptimizerSpec())))
    [line] = [line for line in text.splitlines() if line.startswith("language, adapters")]
    # 2 layers of 7 matrices: 4 columns for each row and each column of them.
    sides = 2 * ((32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 64))
    assert line.split()[2:4] == ["28", f"{4 * sides / 1000:.2f}"]
    [line] = [line for line in text.splitlines() if line.startswith("language  ")]
    assert line.endswith("frozen")


@pytest.mark.parametrize("kind", ["muon", "adamw_8bit"])
def test_other_optimizers_train_them(kind):
    shape = inspect(adapted(LoraSpec(rank=4), freeze=("vision", "connector")))
    groups = group_parameters(shape.parameters, spec=OptimizerSpec(kind=kind))
    assert {group.algorithm for group in groups} == {kind}
    assert sum(len(group.parameters) for group in groups) == 2 * 7 * 2
