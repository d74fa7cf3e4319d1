"""DeepSpeed's ZeRO follows plain torch, skips what is not finite, and leaves nothing behind."""

from __future__ import annotations

import math
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from diptych.core.records import (
    Layout,
    LossScale,
    MixedPrecision,
    OptimizerOffload,
    ParameterOffload,
)
from tests.parallel.zero_toy import (
    CPU,
    STAGES,
    batches_of,
    close,
    compile_kernel,
    engine_of,
    step,
    train,
    train_plainly,
    whole,
    zero,
)


def _assert_follows(found, plain, *, rtol):
    np.testing.assert_allclose(found["losses"], plain["losses"], rtol=rtol)
    np.testing.assert_allclose(found["norms"], plain["norms"], rtol=10 * rtol)


@pytest.fixture(scope="module")
def plain():
    return train_plainly(8)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_it_follows_plain_torch_through_accumulation(stage, num_ranks, ranks, plain):
    layout = zero(stage, ranks=num_ranks)
    found = ranks(num_ranks).run(train, layout=layout, num_steps=8, micro_batches=(1, 2))[0]
    _assert_follows(found, plain, rtol=1e-5)
    for name, weight in plain["weights"].items():
        torch.testing.assert_close(found["tensors"][f"model.{name}"], weight, rtol=1e-4, atol=1e-4)
    assert plain["losses"][-1] < 0.9 * plain["losses"][0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_it_follows_in_lower_precision(stage, precision, ranks, plain):
    scale = MixedPrecision(loss_scale=LossScale(initial=4.0))
    layout = zero(stage, precision=precision, mixed=scale)
    found = ranks(2).run(train, layout=layout, num_steps=8, micro_batches=(2, 1))[0]
    _assert_follows(found, plain, rtol=2e-2)
    assert found["scales"] == [4.0 if precision == "fp16" else None] * 8
    # Rounding must show, or the weights were fp32 all along.
    assert not np.allclose(found["losses"], plain["losses"], rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 1, "optimizer": CPU},
        {"stage": 2, "optimizer": CPU},
        {"stage": 3, "optimizer": CPU, "parameters": ParameterOffload(to="cpu")},
        {"stage": 2, "contiguous_gradients": False, "overlap": True},
        {"stage": 2, "reduce_bucket_elements": 600, "allgather_bucket_elements": 600},
        {"stage": 3, "persistence_threshold_elements": 0, "max_live_elements": 1},
        {"stage": 3, "overlap": True, "prefetch_elements": 0, "max_reuse_distance_elements": 0},
    ],
    ids=str,
)
def test_its_options_change_no_result(options, ranks, plain):
    found = ranks(2).run(train, layout=zero(**options), num_steps=8, micro_batches=(1, 2))[0]
    _assert_follows(found, plain, rtol=1e-5)


def _poisoned(layout, *, poison, on_rank):
    engine, world = engine_of(layout)
    batches = batches_of(3)
    step(engine, world, batches[0])
    before = whole(engine.tensors(), world)
    factor = poison if world.rank == on_rank else None
    _, update = step(engine, world, batches[1], num_micro_batches=2, poison=factor)
    after = whole(engine.tensors(), world)
    _, later = step(engine, world, batches[2])
    moved = whole(engine.tensors(), world)
    close(engine)
    return {
        "update": update,
        "changed": [name for name in before if not torch.equal(before[name], after[name])],
        "later": later,
        "moved": [name for name in before if not torch.equal(after[name], moved[name])],
    }


@pytest.mark.parametrize(
    ("precision", "poison"),
    [("fp32", math.nan), ("fp32", math.inf), ("bf16", math.nan), ("fp16", math.inf)],
)
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(stage, precision, poison, ranks):
    scale = MixedPrecision(loss_scale=LossScale(initial=4.0))
    layout = zero(stage, precision=precision, mixed=scale)
    for found in ranks(2).run(_poisoned, layout=layout, poison=poison, on_rank=1):
        assert not found["update"].applied
        assert not math.isfinite(found["update"].grad_norm)
        assert found["changed"] == []
        assert found["later"].applied
        assert found["later"].loss_scale == (2.0 if precision == "fp16" else None)
        # Three frozen tensors do not move; everything else does.
        assert len(found["moved"]) >= 15


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_offloaded_states_survive_a_gradient_that_is_not_finite(stage, precision, ranks):
    layout = zero(stage, precision=precision, optimizer=CPU)
    for found in ranks(2).run(_poisoned, layout=layout, poison=math.nan, on_rank=0):
        assert not found["update"].applied
        assert found["changed"] == []
        assert found["later"].applied


def _dropped(layout):
    """Take a step with a gradient before it that was dropped, and one without."""
    norms = []
    for drops in (False, True):
        engine, world = engine_of(layout)
        first, second, third = batches_of(3)
        step(engine, world, first)
        update = engine.update
        if drops:
            engine.update = lambda **settings: None
            step(engine, world, second, num_micro_batches=2)
            engine.update = update
            engine.drop_gradient()
        norms.append(step(engine, world, third, num_micro_batches=2)[1].grad_norm)
        close(engine)
    return norms


@pytest.mark.parametrize(
    ("offload", "precision"),
    [(OptimizerOffload(), "fp32"), (OptimizerOffload(), "fp16"), (CPU, "bf16")],
    ids=["fp32", "fp16", "offloaded, bf16"],
)
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_dropped_leaves_no_trace(stage, offload, precision, ranks):
    scale = MixedPrecision(loss_scale=LossScale(initial=4.0))
    layout = zero(stage, precision=precision, mixed=scale, optimizer=offload)
    without, after = ranks(2).run(_dropped, layout=layout)[0]
    assert without == after


def _leave_behind():
    """Use ZeRO 3 and close it; return what DeepSpeed may have left in this process."""
    from deepspeed.runtime.zero import parameter_offload

    linear, dtype = nn.functional.linear, torch.get_default_dtype()
    # Other tests of this process may have left theirs open.
    num_listed = len(parameter_offload.FWD_MODULE_STACK)
    engine, world = engine_of(zero(3))
    patched = nn.functional.linear is not linear
    step(engine, world, batches_of(1)[0])
    toy = engine.model
    engine.close()
    hooks = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in toy.modules()
    )
    return {
        "patched": patched,
        "linear": nn.functional.linear is linear,
        "dtype": torch.get_default_dtype() == dtype,
        "stack": len(parameter_offload.FWD_MODULE_STACK) - num_listed,
        "hooks": hooks,
    }


def test_it_leaves_nothing_behind_for_others_in_the_process(ranks):
    before = ranks(2).run(train, layout=Layout(engine="ddp", dp=2), num_steps=3)
    for found in ranks(2).run(_leave_behind):
        assert found == {"patched": False, "linear": True, "dtype": True, "stack": 0, "hooks": 2}
    after = ranks(2).run(train, layout=Layout(engine="ddp", dp=2), num_steps=3)
    assert before[0]["losses"] == after[0]["losses"]
    first = ranks(2).run(train, layout=zero(3), num_steps=3)
    again = ranks(2).run(train, layout=zero(3), num_steps=3)
    assert first[0]["losses"] == again[0]["losses"]


class _Recomputed(nn.Module):
    """Runs a layer anew in the backward pass, which leaves it as soon as all is there."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, given):
        return checkpoint(self.layer, given, use_reentrant=False)


def _recompute():
    from deepspeed.runtime.zero import parameter_offload

    before = len(parameter_offload.FWD_MODULE_STACK)
    engine, world = engine_of(zero(3))
    engine.model.down = _Recomputed(engine.model.down)
    for batch in batches_of(3):
        step(engine, world, batch)
    # The whole model stays.
    listed = len(parameter_offload.FWD_MODULE_STACK) - before
    engine.close()
    return listed, len(parameter_offload.FWD_MODULE_STACK) - before


def test_what_recomputing_leaves_early_is_not_listed_for_ever(ranks):
    assert ranks(2).run(_recompute) == [(1, 0), (1, 0)]


@pytest.fixture(scope="session")
def cpu_adam():
    compile_kernel("CPUAdamBuilder")


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam")
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not (shutil.which("g++") and shutil.which("ninja")),
    reason="DeepSpeed compiles its AdamW with g++ and ninja, which are not both here",
)
@pytest.mark.parametrize("stage", STAGES)
def test_deepspeeds_own_adam_follows_plain_torch(stage, ranks, plain):
    layout = zero(stage, optimizer=OptimizerOffload(to="cpu", adam="deepspeed"))
    found = ranks(2).run(train, layout=layout, num_steps=8, micro_batches=(1, 2))[0]
    _assert_follows(found, plain, rtol=1e-5)
