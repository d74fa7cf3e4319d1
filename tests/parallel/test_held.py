"""Bytes that real ranks hold and send, against the planner's arithmetic: equal on every rank.

What is held is equal to the byte; what is sent is, once norms and flags are left out, for torch's
own engines, and within a part in a thousand for DeepSpeed.
"""

from __future__ import annotations

from typing import Any

import pytest

from diptych.core.records import Layout, ModelSpec, OptimizerSpec, TowerRates
from diptych.model.inspect import inspect
from diptych.plan.memory import held_bytes
from diptych.plan.sent import sent_bytes
from diptych.plan.states import States
from tests.conftest import TINY_MODEL
from tests.parallel.bytes import measure_steps

ODD = TINY_MODEL.model_copy(
    update={
        "sizes": {
            "text": {
                **TINY_MODEL.sizes["text"],
                "vocab_size": 511,
                "intermediate_size": 70,
                "hidden_size": 38,
                "head_dim": 18,
            },
            "vision": {
                **TINY_MODEL.sizes["vision"],
                "hidden_size": 44,
                "num_heads": 1,
                "intermediate_size": 50,
                "num_position_embeddings": 49,
            },
        }
    }
)
"""Sizes that do not divide by 2, 3 or 4, so that every kind of padding is in it."""


def frozen(*towers: str) -> ModelSpec:
    return ODD.model_copy(update={"freeze": towers})


SOME = frozen("model.visual.*embed.*", "model.visual.blocks.0.*", "*.mlp.*", "connector")
"""Frozen before what trains, behind it, and within blocks that train."""
RATES = OptimizerSpec(
    towers={"vision": TowerRates(lr=1e-4, layer_decay=0.5), "language": TowerRates(layer_decay=0.9)}
)
MUON = OptimizerSpec(kind="muon")
MEAN = {"ema_decay": 0.9}


def ddp(size: int, **fields: Any) -> Layout:
    return Layout.model_validate({"engine": "ddp", "dp": size, **fields})


def fsdp2(size: int, **fields: Any) -> Layout:
    return Layout.model_validate({"engine": "fsdp2", "shard": size, **fields})


def zero(size: int, stage: int, *, precision: str = "fp32", **options: Any) -> Layout:
    fields = {"engine": "zero", "shard": size, "precision": precision}
    return Layout.model_validate({**fields, "zero": {"stage": stage, **options}})


def check(ranks: Any, size: int, cells: list[dict[str, Any]], *, sent: float = 0.0) -> None:
    """Compare every cell on every rank; `sent` is how far the bytes sent may be off."""
    found = ranks(size).run(measure_steps, cells=cells)
    for number, cell in enumerate(cells):
        layout, shape = cell["layout"], inspect(cell["model"])
        count = {"num_micro_batches": cell.get("num_micro_batches", 1)}
        states = States(cell.get("optimizer", OptimizerSpec()), has_mean="ema_decay" in cell)
        # A norm for every tensor; DDP tells once which tensor is in which bucket.
        numbers = 8 if layout.engine == "zero" else 4 * len(shape.trained) + 64
        for rank in range(size):
            held, traffic = found[rank][number]
            expected = held_bytes(shape, layout=layout, rank=rank, states=states, **count)
            assert held == expected, (cell, rank)
            predicted = sent_bytes(shape, layout=layout, **count)
            counted = traffic.larger_than(numbers).sent_bytes
            assert counted == pytest.approx(predicted, rel=sent, abs=1e-3), (cell, rank)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ddp(ranks, size):
    cells: list[dict[str, Any]] = [
        {"layout": ddp(size), "model": TINY_MODEL},
        {"layout": ddp(size, precision="bf16"), "model": frozen("vision"), "num_micro_batches": 2},
    ]
    if size == 2:
        separate = {"gradient_as_bucket_view": False, "bucket_bytes": 20_000}
        powersgd = {"compression": "powersgd", "powersgd_rank": 2, "powersgd_start_step": 2}
        cells += [
            {"layout": ddp(size, ddp=separate), "model": ODD, "num_micro_batches": 2},
            {"layout": ddp(size, grad_sync="every"), "model": ODD, "num_micro_batches": 2},
            {"layout": ddp(size), "model": SOME, "optimizer": RATES, **MEAN},
            {"layout": ddp(size), "model": SOME, "optimizer": MUON, **MEAN},
            {"layout": ddp(size, ddp={"compression": "bf16"}), "model": ODD},
            {"layout": ddp(size, ddp=powersgd), "model": ODD, "num_steps": 4},
        ]
    check(ranks, size, cells)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_fsdp2(ranks, size):
    once, bf16 = {"gather": "once"}, {"precision": "bf16"}
    cells: list[dict[str, Any]] = [
        {"layout": fsdp2(size), "model": TINY_MODEL},
        {"layout": fsdp2(size, **bf16), "model": ODD, "num_micro_batches": 2},
    ]
    if size == 4:
        copies = fsdp2(2, dp=2)
        cells.append({"layout": copies, "model": ODD, "num_micro_batches": 2})
    if size == 2:
        every = fsdp2(size, **bf16, grad_sync="every", fsdp=once)
        towers = {"towers": {"vision": "fp32"}, "reduce": "bf16"}
        ahead = {"prefetch_forward": 2, "prefetch_backward": 2}
        cells += [
            {"layout": every, "model": ODD, "num_micro_batches": 2},
            {"layout": fsdp2(size, **bf16, mixed_precision=towers), "model": ODD},
            {"layout": fsdp2(size, fsdp=ahead), "model": frozen("vision")},
            {"layout": fsdp2(size), "model": frozen("vision", "language")},
            {"layout": fsdp2(size), "model": SOME, "num_micro_batches": 2, **MEAN},
            {"layout": fsdp2(size, memory={"recompute": "blocks"}), "model": ODD},
        ]
    check(ranks, size, cells)


def test_fsdp2_with_norms_in_fp32(ranks):
    """Some of these groups are no larger than a norm's numbers, which are left out."""
    layout = fsdp2(2, precision="bf16", mixed_precision={"keep_fp32": ["norms"]})
    check(ranks, 2, [{"layout": layout, "model": ODD}], sent=2e-3)


@pytest.mark.parametrize("size", [2, 3])
def test_zero(ranks, size):
    pytest.importorskip("deepspeed")
    cells: list[dict[str, Any]] = [
        {"layout": zero(size, stage, precision=precision), "num_micro_batches": 2, "model": ODD}
        for stage in (1, 2, 3)
        for precision in (("fp32", "bf16") if size == 2 else ("bf16",))
    ]
    if size == 2:
        passing = {
            "persistence_threshold_elements": 2000,
            "max_reuse_distance_elements": 60_000,
            "prefetch_elements": 0,
        }
        offload = {"optimizer": {"to": "cpu", "adam": "torch"}}
        vision = {"num_micro_batches": 2, "model": frozen("vision")}
        cells += [
            {"layout": zero(size, 3, **passing), "num_steps": 4, **vision},
            {"layout": zero(size, 2, precision="bf16", **offload), **vision},
            {"layout": zero(size, 1, precision="fp16"), "num_micro_batches": 2, "model": ODD},
            {"layout": zero(size, 1, precision="bf16", **offload), "model": ODD},
            {"layout": zero(size, 2), "num_micro_batches": 2, "model": SOME, **MEAN},
            {"layout": zero(size, 3), "num_micro_batches": 2, "model": SOME},
            # Every rate is a group of its own, which DeepSpeed pads by itself.
            {"layout": zero(size, 1), "model": ODD, "optimizer": RATES},
            {"layout": zero(size, 3), "num_micro_batches": 2, "model": ODD, "optimizer": RATES},
        ]
    check(ranks, size, cells, sent=1e-3)
