"""What `plan/zero.py` says a rank holds is what DeepSpeed's tensors take, to the byte."""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest
import torch
from torch._subclasses.fake_tensor import is_fake

from diptych.core.records import (
    HeldBytes,
    Layout,
    LossScale,
    MixedPrecision,
    ModelShape,
    OptimizerOffload,
    Parameter,
    ParameterOffload,
    ZeroOptions,
)
from diptych.parallel.zero_tensors import flat_weights
from diptych.plan.zero import zero_bytes, zero_held_bytes, zero_passing_bytes
from tests.parallel.zero_toy import CPU, Toy, batches_of, close, engine_of, step

SCALARS = 200
"""Bytes of norms, flags and counters that DeepSpeed keeps beside."""


def _shape(*, freeze):
    parameters = tuple(
        Parameter(
            name=name,
            shape=tuple(each.shape),
            dtype="fp32",
            tower="vision" if name.startswith("up.") else "language",
            block="",
            trains=not (freeze and name.startswith("up.")),
            embeds=name == "embed_tokens.weight",
        )
        for name, each in Toy().named_parameters()
    )
    return ModelShape(
        family="qwen3_vl",
        parameters=parameters,
        sizes={},
        tied_parameters={},
    )


def _alive():
    """Find every tensor's memory in this process, whoever holds it."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and each.device.type == "cpu" and not is_fake(each):
            storage = each.untyped_storage()
            # What was traced elsewhere in this process has a size, and no memory to point to.
            with suppress(RuntimeError):
                if storage.nbytes():
                    found[storage.data_ptr()] = storage
    return found


def _count(tensors, *, but=()):
    sizes = {}
    for each in tensors:
        if each is not None:
            storage = each.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in but:
                sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


def _weights(engine, optimizer):
    for parameter in engine.model.parameters():
        yield parameter.detach()
        yield getattr(parameter, "ds_tensor", None)
    yield from engine._tensors._frozen.rows.values()
    yield from getattr(optimizer, "param_buffer_of_bit16_for_cpu_offload_groups", ())


def _gradients(engine, optimizer):
    for parameter in engine.model.parameters():
        yield from (parameter.grad, getattr(parameter, "grad_accum", None))
    for group in getattr(optimizer, "averaged_gradients", {}).values():
        yield from group or ()
    if hasattr(optimizer, "fp16_groups"):
        yield from (bucket.buffer for bucket in optimizer.ipg_buckets.values())
        yield optimizer.grad_partitions_flat_buffer
    yield from getattr(optimizer, "fp32_groups_gradients_flat", ())
    yield from (flat.grad for flat in flat_weights(optimizer))
    yield from getattr(optimizer, "accumulated_grads_in_cpu", {}).values()
    for place in ("cpu", "gpu"):
        yield getattr(optimizer, f"temp_grad_buffer_for_{place}_offload", None)


def _states(engine, optimizer):
    yield from (flat.detach() for flat in flat_weights(optimizer))
    for state in engine.optimizer.state.values():
        yield from (each for each in state.values() if isinstance(each, torch.Tensor))


def _measure(layout, *, freeze, num_micro_batches):
    batches = batches_of(2)
    before = _alive()
    engine, world = engine_of(layout, freeze=freeze)
    optimizer = engine.module.optimizer
    step(engine, world, batches[0], num_micro_batches=num_micro_batches)
    update, found = engine.update, []

    def count(**settings):
        alive = {key: each for key, each in _alive().items() if key not in before}
        weights = _count(_weights(engine, optimizer))
        kinds = HeldBytes(
            parameters=sum(weights.values()),
            gradients=sum(_count(_gradients(engine, optimizer), but=weights).values()),
            optimizer=sum(_count(_states(engine, optimizer), but=weights).values()),
        )
        found.extend([kinds, sum(each.nbytes() for each in alive.values())])
        return update(**settings)

    engine.update = count
    _, last = step(engine, world, batches[1], num_micro_batches=num_micro_batches)
    assert last.applied
    close(engine)
    return found


CASES = {
    "1, 3 ranks": (3, {"stage": 1}, {}),
    "1, bf16": (2, {"stage": 1}, {"precision": "bf16"}),
    "1, fp16": (2, {"stage": 1}, {"precision": "fp16"}),
    "1, fp16, small bucket": (
        2,
        {"stage": 1, "reduce_bucket_elements": 600},
        {"precision": "fp16"},
    ),
    "1, fp16, scattered": (
        2,
        {"stage": 1, "contiguous_gradients": False},
        {"precision": "fp16"},
    ),
    "2": (2, {"stage": 2}, {}),
    "2, bf16, 3 ranks": (3, {"stage": 2}, {"precision": "bf16"}),
    "3, 3 ranks": (3, {"stage": 3}, {}),
    "3, 1 rank": (1, {"stage": 3}, {}),
    "3, bf16": (2, {"stage": 3}, {"precision": "bf16"}),
    "3, few copies": (
        2,
        {"stage": 3, "persistence_threshold_elements": 40},
        {"precision": "fp16"},
    ),
    "3, no bucket": (2, {"stage": 3, "contiguous_gradients": False}, {}),
    "1, bf16, offloaded": (2, {"stage": 1, "optimizer": CPU}, {"precision": "bf16"}),
    "2, offloaded": (2, {"stage": 2, "optimizer": CPU}, {}),
    "2, bf16, offloaded": (2, {"stage": 2, "optimizer": CPU}, {"precision": "bf16"}),
    "3, all offloaded": (
        3,
        {"stage": 3, "optimizer": CPU, "parameters": ParameterOffload(to="cpu")},
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rank_holds_what_is_predicted(name, ranks):
    num_ranks, options, settings = CASES[name]
    # Frozen weights are in every other case.
    freeze = list(CASES).index(name) % 2 == 0
    layout = Layout(
        engine="zero",
        shard=num_ranks,
        zero=ZeroOptions(**options),
        mixed_precision=MixedPrecision(loss_scale=LossScale(initial=1.0)),
        **settings,
    )
    measured = ranks(num_ranks).run(_measure, layout=layout, freeze=freeze, num_micro_batches=2)
    for rank, (found, everything) in enumerate(measured):
        expected = zero_held_bytes(
            _shape(freeze=freeze), layout=layout, rank=rank, num_micro_batches=2
        )
        assert found == expected
        # Nothing else of size is anywhere in the process.
        assert expected.total <= everything <= expected.total + SCALARS


def test_what_is_offloaded_leaves_the_device():
    shape = _shape(freeze=False)
    here = Layout(engine="zero", shard=2, zero=ZeroOptions(stage=3), precision="bf16")
    there = here.model_copy(
        update={"zero": ZeroOptions(stage=3, optimizer=CPU, parameters=ParameterOffload(to="cpu"))}
    )
    stays, leaves = zero_bytes(shape, layout=here), zero_bytes(shape, layout=there)
    assert stays.host.total == stays.disk == 0
    assert leaves.device.optimizer == 0
    assert leaves.host.optimizer == stays.device.optimizer
    assert leaves.device.total + leaves.host.total >= stays.device.total


def test_the_disk_takes_sixteen_bytes_a_trained_parameter_and_the_weights():
    shape = _shape(freeze=False)
    num_elements = shape.num_parameters
    nvme = {"to": "nvme", "path": "/nvme"}
    layout = Layout(
        engine="zero",
        zero=ZeroOptions(
            stage=3, optimizer=OptimizerOffload(**nvme), parameters=ParameterOffload(**nvme)
        ),
        precision="bf16",
    )
    assert zero_bytes(shape, layout=layout).disk == (16 + 2) * num_elements


def test_whole_gradients_pass_in_stage_1_and_a_bucket_of_them_in_stage_2():
    shape = _shape(freeze=False)
    num_elements = shape.num_parameters

    def passing(**options):
        layout = Layout(engine="zero", shard=2, zero=ZeroOptions(**options))
        return zero_passing_bytes(shape, layout=layout, num_micro_batches=1)

    flat = 4 * -(-num_elements // 2)
    assert passing(stage=1) == 8 * num_elements + flat
    assert passing(stage=2, reduce_bucket_elements=100) == 800 + flat
    assert passing(stage=2, reduce_bucket_elements=100, overlap=True) == 1200 + flat
