"""Batch norms are refused, frozen, or shared by all ranks; never left to one micro-batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from diptych.core.errors import LayoutError
from diptych.core.records import Layout, MemoryOptions
from diptych.model.families import Unit
from diptych.parallel import recompute, storage
from diptych.parallel.batch_norm import settle, synchronise
from diptych.parallel.mesh import World
from diptych.parallel.native import NativeEngine


class Tower(nn.Module):
    def __init__(self, norm=None):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = norm or nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


def make(norm=None):
    """A tower in float64 whose statistics are not the first ones."""
    torch.manual_seed(0)
    model = Tower(norm)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("mean", "var")):
                buffer.uniform_(0.5, 2.0)
    return model.double()


def gradient(model):
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


def test_a_model_without_batch_norm_is_left_alone():
    settle(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), layout=Layout())


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(8), nn.SyncBatchNorm(8), nn.InstanceNorm1d(8, track_running_stats=True)]
)
def test_refused_by_name(norm):
    with pytest.raises(
        LayoutError, match=r"1 (batch )?norm \(norm\).*frozen keeps.*Set it to frozen"
    ):
        settle(make(norm), layout=Layout())


def test_an_instance_norm_without_statistics_is_no_batch_norm():
    settle(make(nn.InstanceNorm1d(8)), layout=Layout())


def test_many_are_counted_and_some_named():
    model = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(5)))
    with pytest.raises(LayoutError, match=r"5 batch norms \(0, 1, 2 and 2 more\)"):
        settle(model, layout=Layout())


def test_frozen_accumulates_to_the_gradient_of_one_batch():
    x = torch.randn(12, 6, dtype=torch.float64)
    expected, model = make().eval(), make()
    expected(x).square().sum().backward()
    settle(model, layout=Layout(batch_norm="frozen"))
    model.train()
    for part in x.split([1, 4, 7]):
        model(part).square().sum().backward()
    difference = torch.linalg.vector_norm(gradient(model) - gradient(expected))
    assert difference <= 1e-12 * torch.linalg.vector_norm(gradient(expected))
    assert model.norm.weight.grad.abs().sum() > 0, "its weight trains"


def test_left_as_it_is_accumulation_would_differ():
    """Why a batch norm is never left as it is."""
    x = torch.randn(12, 6, dtype=torch.float64)
    whole, parts = make(), make()
    whole(x).square().sum().backward()
    for part in x.split([5, 7]):
        parts(part).square().sum().backward()
    assert torch.linalg.vector_norm(gradient(parts) - gradient(whole)) > 0.01


def test_frozen_statistics_never_move():
    model = make()
    before = copy.deepcopy(dict(model.named_buffers()))
    settle(model, layout=Layout(batch_norm="frozen"))
    for _ in range(2):
        model.train()
        model(torch.randn(4, 6, dtype=torch.float64)).sum().backward()
        model.eval()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])


def test_frozen_may_be_recomputed():
    model, plain = make(), make()
    for each in (model, plain):
        settle(each, layout=Layout(batch_norm="frozen"))
        each.train()
    unit = Unit(name="tower", module=model, tower="vision", depth=0)
    recompute.apply([unit], options=MemoryOptions(recompute="blocks"))
    x = torch.randn(5, 6, dtype=torch.float64)
    for each in (model, plain):
        each(x).square().sum().backward()
    torch.testing.assert_close(gradient(model), gradient(plain), rtol=1e-12, atol=0)


def test_without_statistics_there_is_nothing_to_freeze():
    model = make(nn.BatchNorm1d(8, track_running_stats=False))
    with pytest.raises(LayoutError, match=r"\(norm\), which keeps no running statistics"):
        settle(model, layout=Layout(batch_norm="frozen"))


def test_sync_is_refused_on_a_cpu():
    with pytest.raises(LayoutError, match="GPUs only"):
        settle(make(), layout=Layout(batch_norm="sync"))


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (nn.InstanceNorm1d(8, track_running_stats=True), "is an instance norm"),
        (nn.BatchNorm1d(8, momentum=None), "averages over all batches"),
    ],
)
def test_what_cannot_be_synchronised_is_refused(norm, message):
    with pytest.raises(LayoutError, match=message):
        synchronise(make(norm))


def test_synchronised_statistics_are_in_checkpoints():
    model = make()
    names = set(dict(model.named_parameters()))
    synchronise(model)
    assert isinstance(model.norm, nn.SyncBatchNorm)
    assert set(dict(model.named_parameters())) == names
    tensors = storage.tensors_of(model, optimizer=torch.optim.AdamW(model.parameters()))
    assert tensors["model.norm.running_var"] is model.norm.running_var
    assert tensors["model.norm.running_mean"] is model.norm.running_mean


def spread_alone(mode):
    """A tower on one process, which every mode can train on; a group would need a GPU for sync."""
    model = make()
    if mode == "frozen":
        settle(model, layout=Layout(batch_norm="frozen"))
    else:
        synchronise(model)
    model.train()
    return NativeEngine(
        model,
        model=model,
        units=[],
        layout=Layout(),
        world=World(rank=0, size=1, device=torch.device("cpu")),
        build_optimizer=lambda each: torch.optim.AdamW(each.parameters(), lr=0.01),
    )


def train(engine, seeds):
    for seed in seeds:
        random = torch.Generator().manual_seed(seed)
        x = torch.randn(9, 6, dtype=torch.float64, generator=random)
        engine.backward(engine.module(x).square().sum(), weight=0.1)
        engine.update(lr=0.01, max_grad_norm=1.0)


@pytest.mark.parametrize("mode", ["frozen", "sync"])
def test_resumed_statistics_and_weights_are_the_same_to_the_last_bit(mode, tmp_path):
    through, resumed, folder = spread_alone(mode), spread_alone(mode), tmp_path / "step-00000003"
    train(through, range(3))
    world = World(rank=0, size=1, device=torch.device("cpu"))
    storage.save(folder, tensors=through.tensors(), state={}, world=world)
    train(through, range(3, 5))
    # What is not loaded shows.
    train(resumed, [7])
    tensors = resumed.tensors()
    storage.load(folder, tensors=tensors)
    resumed.take(tensors, num_updates=3)
    train(resumed, range(3, 5))
    expected, begun = through.model.state_dict(), make().state_dict()
    for name, tensor in resumed.model.state_dict().items():
        if name != "norm.num_batches_tracked":
            assert torch.equal(tensor, expected[name]), name
    moved = not torch.equal(expected["norm.running_mean"], begun["norm.running_mean"])
    assert moved == (mode == "sync")
