"""Bytes counted at collectives of real ranks, against bytes by hand; whoever calls them."""

from __future__ import annotations

import pytest

from diptych.parallel.traffic import Call, count_traffic


def known_calls():
    """One of each kind, [10] float32 (40 bytes) on every rank, counted on this one."""
    import torch
    import torch.distributed as dist

    size = dist.get_world_size()

    def part():
        return torch.zeros(10)

    whole = torch.zeros(10 * size)
    parts = [part() for _ in range(size)]
    pairs = [part() for _ in range(2)]
    calls = {
        "all_reduce": lambda: dist.all_reduce(part()),
        "all_gather": lambda: dist.all_gather_single(whole, part()),
        "all_gather of a list": lambda: dist.all_gather(parts, part()),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part(), whole),
        "broadcast": lambda: dist.broadcast(part(), src=0),
        "reduce": lambda: dist.reduce(part(), dst=0),
        "two at once": lambda: [dist.all_reduce(each) for each in pairs],
        "nothing": lambda: dist.barrier(),
    }
    found = {}
    for name, call in calls.items():
        with count_traffic() as traffic:
            call()
        found[name] = traffic
    with count_traffic() as traffic, dist._coalescing_manager():
        calls["two at once"]()
    found["two as one"] = traffic
    with count_traffic() as traffic:
        dist.all_reduce(torch.zeros(5, dtype=torch.bfloat16))
        dist.all_reduce(torch.zeros(1, dtype=torch.float64))
    found["dtypes"] = traffic
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_every_kind_by_hand(ranks, size):
    found = ranks(size).run(known_calls)[-1]
    whole, reduced = 40 * size, 2 * (size - 1) / size * 40
    passed = (size - 1) / size
    assert found["all_reduce"].calls == [Call("all_reduce", size, "float32", 40)]
    assert found["all_reduce"].sent_bytes == pytest.approx(reduced)
    for name in ("all_gather", "all_gather of a list"):
        assert found[name].calls == [Call("all_gather", size, "float32", whole)]
        assert found[name].sent_bytes == pytest.approx(passed * whole)
    assert found["reduce_scatter"].calls == [Call("reduce_scatter", size, "float32", whole)]
    assert found["broadcast"].sent_bytes == pytest.approx(passed * 40)
    assert found["reduce"].sent_bytes == pytest.approx(passed * 40)
    assert found["two at once"].payload_bytes == found["two as one"].payload_bytes == 80
    assert len(found["two as one"].calls) == 1
    assert found["nothing"].calls == []
    assert found["dtypes"].by("dtype") == {
        ("bfloat16",): pytest.approx(2 * passed * 10),
        ("float64",): pytest.approx(2 * passed * 8),
    }
    assert found["dtypes"].larger_than(8).payload_bytes == 10


def calls_of_engines():
    """Linear layers of 10 x 7 and 7 x 5 with biases, through DDP's C++, FSDP2 and a DTensor."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def layers():
        return nn.Sequential(nn.Linear(10, 7), nn.Linear(7, 5))

    def backward(module):
        with count_traffic() as traffic:
            module(torch.randn(3, 10)).sum().backward()
        return traffic

    replicated = DistributedDataParallel(layers())
    found = {"ddp": backward(replicated)}
    factored = DistributedDataParallel(layers())
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    factored.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(3):
        found["powersgd"] = backward(factored)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = layers()
    fully_shard(sharded[1], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    found["fsdp2"] = backward(sharded)
    with count_traffic() as traffic:
        sharded[0].weight.full_tensor()
    found["dtensor"] = traffic
    with count_traffic() as traffic:
        torch.zeros(3).sum()
    found["nothing"] = traffic
    return found


def test_engines_are_seen(ranks):
    found = ranks(2).run(calls_of_engines)[1]
    whole = 4 * (77 + 40)
    assert found["ddp"].calls == [Call("all_reduce", 2, "float32", whole)]
    # The root is gathered once, with its 7 rows padded to 8; the block twice, with 5 padded to 6.
    root, block = 4 * (8 * 10 + 8), 4 * (6 * 7 + 6)
    assert found["fsdp2"].by("kind") == {
        ("all_gather",): (root + 2 * block) / 2,
        ("reduce_scatter",): (root + block) / 2,
    }
    assert found["dtensor"].calls == [Call("all_gather", 2, "float32", 4 * 80)]
    # Both biases whole, then factors of rank 1, which callbacks reduce in other threads.
    assert [call.payload_bytes for call in found["powersgd"].calls] == [
        4 * (7 + 5),
        4 * (7 + 5),
        4 * (10 + 7),
    ]
    assert found["nothing"].calls == []
