"""Offloading moves what autograd saves, once, brings it back unchanged, and leaves weights."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from diptych.core.records import Layout, MemoryOptions
from diptych.parallel import activations
from tests.conftest import TINY_MODEL, TINY_PACKS, TINY_SCHEDULE
from tests.runs import make_spec, trajectory

OFFLOADED = Layout(memory=MemoryOptions(offload_activations=True))


class Layers(nn.Module):
    """Two linear layers whose activations are large: [64, 64]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, values):
        hidden = self.first(values)
        # Saved twice, as itself and as a view; and written to in between by nobody.
        both = hidden.sin() + hidden.t().cos().t()
        return self.second(both).square().sum()


@pytest.fixture
def moved(monkeypatch):
    """The sizes in bytes of the storages that went to the host."""
    sizes = []
    to_host = activations._Offload._to_host

    def counting(self, tensor):
        sizes.append(tensor.untyped_storage().nbytes())
        return to_host(self, tensor)

    monkeypatch.setattr(activations._Offload, "_to_host", counting)
    return sizes


def gradient(module, values):
    module.zero_grad()
    module(values).backward()
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


def test_a_storage_goes_once_and_weights_stay(moved):
    values = torch.randn(64, 64)
    expected = gradient(Layers(), values)
    module = Layers()
    activations.apply(module, layout=OFFLOADED)
    assert torch.equal(gradient(module, values), expected)
    # The input, the hidden states (saved for sine and for cosine), their sum, and the output.
    assert moved == [64 * 64 * 4] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_that_autocast_has_cast_stays(moved, dtype):
    module = Layers()
    activations.apply(module, layout=OFFLOADED)
    with torch.autocast("cpu", dtype=dtype):
        module(torch.randn(32, 64, dtype=dtype)[:16].clone()).backward()
    # Sixteen rows of 64, and no weight's 64 x 64.
    assert moved == [16 * 64 * 2] * 4


def test_a_storage_that_was_written_to_goes_again(moved):
    class Writes(nn.Module):
        def forward(self, values):
            buffer = torch.zeros(2, 64, 64)
            buffer[0] = 1
            first = values * buffer[0]
            buffer[1] = 2
            return (first + values * buffer[1]).sum()

    values = torch.randn(64, 64, requires_grad=True)
    module = Writes()
    activations.apply(module, layout=OFFLOADED)
    module(values).backward()
    assert torch.equal(values.grad, torch.full((64, 64), 3.0))
    assert moved == [2 * 64 * 64 * 4] * 2


def test_small_tensors_and_other_devices_are_left(moved):
    module = Layers()
    activations.apply(module, layout=OFFLOADED)
    module(torch.randn(15, 64)).backward()
    assert moved == []
    # On a GPU's layout, what the host has already stays there.
    module = Layers()
    activations.apply(module, layout=OFFLOADED.model_copy(update={"device": "cuda"}))
    module(torch.randn(64, 64)).backward()
    assert moved == []


def test_only_while_training(moved):
    module = Layers().eval()
    activations.apply(module, layout=OFFLOADED)
    module(torch.randn(64, 64))
    with torch.no_grad():
        module.train()(torch.randn(64, 64))
    assert moved == []
    untouched = Layers()
    activations.apply(untouched, layout=Layout())
    untouched(torch.randn(64, 64)).backward()
    assert moved == []


@pytest.mark.parametrize("size", [8, 64])
def test_a_result_does_not_keep_itself_alive(size):
    class Tanh(nn.Module):
        def forward(self, values):
            result = values.exp().tanh()
            seen.append(weakref.ref(result))
            return result.sum()

    seen = []
    module = Tanh()
    activations.apply(module, layout=OFFLOADED)
    gc.disable()
    try:
        loss = module(torch.randn(size, size, requires_grad=True))
        del loss
        assert seen[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("recompute", ["none", "blocks", "operators"])
@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        ({"engine": "fsdp2", "shard": 2, "micro_batch": 2}, TINY_SCHEDULE),
        ({"engine": "ddp", "dp": 2, "micro_batch": 3, "precision": "bf16"}, TINY_PACKS),
    ],
    ids=["fsdp2", "ddp in bf16, packed"],
)
def test_real_ranks_follow_bit_by_bit(ranks, corpus, recompute, layout, schedule):
    found = []
    for offload in (False, True):
        memory = MemoryOptions(recompute=recompute, offload_activations=offload)
        spec = make_spec(
            corpus, layout=Layout(**layout, memory=memory), model=TINY_MODEL, schedule=schedule
        )
        found.append(ranks(2).run(trajectory, spec=spec, num_steps=2)[0])
    np.testing.assert_array_equal(found[0]["gradient"], found[1]["gradient"])
    np.testing.assert_array_equal(found[0]["losses"], found[1]["losses"])


def moved_in_sharded_layers():
    """Run two sharded layers; return the bytes of what went to the host."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sizes = []
    to_host = activations._Offload._to_host

    def counting(self, tensor):
        sizes.append(tensor.untyped_storage().nbytes())
        return to_host(self, tensor)

    module = Layers()
    activations.apply(module, layout=OFFLOADED)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(module.first, mesh=mesh)
    fully_shard(module.second, mesh=mesh)
    fully_shard(module, mesh=mesh)
    activations._Offload._to_host = counting
    try:
        module(torch.randn(32, 64)).backward()
    finally:
        activations._Offload._to_host = to_host
    return sizes


def test_gathered_weights_stay(ranks):
    # [32, 64] activations in fp32; a gathered weight has twice as many bytes.
    assert ranks(2).run(moved_in_sharded_layers)[0] == [32 * 64 * 4] * 4


@pytest.mark.gpu
def test_on_a_gpu_less_is_allocated_and_no_bit_changes():
    class Deep(nn.Sequential):
        def forward(self, values):
            return super().forward(values).square().sum()

    peaks, found = [], []
    for offload in (False, True):
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(16))
        module = Deep(*layers).cuda()
        memory = MemoryOptions(offload_activations=offload)
        activations.apply(module, layout=Layout(device="cuda", memory=memory))
        values = torch.randn(65536, 256, device="cuda")
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            found.append(gradient(module, values).cpu())
            peaks.append(torch.cuda.max_memory_allocated())
    assert all(torch.equal(each, found[0]) for each in found)
    assert peaks[-1] < 0.6 * peaks[1]
