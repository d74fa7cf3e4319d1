"""What is kept beside the weights, in bytes worked by hand, and which layouts cannot keep it."""

from __future__ import annotations

import pytest

from diptych.core.errors import ConfigError, LayoutError
from diptych.core.records import Layout, OptimizerSpec, ScheduleSpec, TowerRates
from diptych.plan.memory import held_bytes, host_bytes
from diptych.plan.search import LayoutParams, search
from diptych.plan.speed import step_floor_s
from diptych.plan.states import States, refusal
from diptych.plan.zero import zero_bytes
from diptych.shape.counts import BatchCounts
from tests.plan.test_memory import shape_of

MEAN = States(has_mean=True)
MUON = States(OptimizerSpec(kind="muon"))
LOW = States(OptimizerSpec(kind="adamw_8bit"))
SHAPE = shape_of(("", (10, 5)), ("b", (64, 64)), ("b", (5000,)), ("b", (9,)))
"""An embedding's neighbour, a block's matrix, and two vectors: 50, 4,096, 5,000 and 9 elements."""
ALL = 50 + 4096 + 5000 + 9


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (States(), 8 * ALL + 4 * 4),
        (MEAN, 12 * ALL + 4 * 4),
        # The matrix of the block has one moment and no counter.
        (MUON, 8 * (ALL - 4096) + 4 * 3 + 4 * 4096),
        # Only the matrix fills blocks of 256: two moments of a byte, 16 scales, 256 values each.
        (LOW, 8 * (ALL - 4096) + 4 * 4 + 2 * (4096 + 4 * 16 + 4 * 256)),
    ],
)
def test_replicas_hold(states, expected):
    held = held_bytes(SHAPE, layout=Layout(dp=2), states=states)
    assert held.optimizer == expected
    assert held.parameters == held.gradients == 4 * ALL


def test_the_mean_is_shared_out_like_the_weights():
    """Rows over 3 ranks: 4, 4 and 2; 22, 22 and 20; 1,667, 1,667 and 1,666; 3 each."""
    layout = Layout(engine="fsdp2", shard=3)
    for rank, num in enumerate((20 + 22 * 64 + 1667 + 3,) * 2 + (10 + 20 * 64 + 1666 + 3,)):
        held = held_bytes(SHAPE, layout=layout, rank=rank, states=MEAN)
        assert held.optimizer == 12 * num + 4 * 4


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_s_partitions_have_a_mean_too(stage):
    layout = Layout.model_validate({"engine": "zero", "shard": 2, "zero": {"stage": stage}})
    without, having = (
        zero_bytes(SHAPE, layout=layout),
        zero_bytes(SHAPE, layout=layout, states=MEAN),
    )
    counters = 4 * 2
    assert (having.device.optimizer - counters) * 12 == (without.device.optimizer - counters) * 16
    assert having.device.gradients == without.device.gradients


def test_every_rate_is_padded_by_itself():
    """Groups of 8,196 and 5,009 elements over 2 ranks: multiples of 4; then of each block."""
    blocks = [("b0", (3, 3)), ("b1", (3, 3)), ("b2", (3, 3))]
    layout = Layout.model_validate({"engine": "zero", "shard": 2, "zero": {"stage": 2}})
    together = zero_bytes(shape_of(*blocks), layout=layout)
    assert together.device.optimizer == 12 * 14 + 4
    rates = OptimizerSpec(towers={"language": TowerRates(layer_decay=0.5)})
    apart = zero_bytes(shape_of(*blocks), layout=layout, states=States(rates))
    assert apart.device.optimizer == 3 * (12 * 6 + 4)


def test_a_mean_goes_where_the_optimizer_goes(model_of_size):
    shape, counts = (
        model_of_size(1_000_000),
        BatchCounts.of([1], image_patches=[], num_head_tokens=1),
    )
    layout = Layout.model_validate(
        {"engine": "zero", "device": "cuda", "zero": {"optimizer": {"to": "cpu"}}}
    )
    given = {"layout": layout, "counts": counts, "num_micro_batches": 1}
    more = host_bytes(shape, states=MEAN, **given) - host_bytes(shape, **given)
    assert more == 4_000_000


def test_an_update_moves_what_it_reads_and_writes(model_of_size, gpus):
    cluster = gpus("a GPU", 1, num_devices=1, flops_per_s={"fp32": 1e30}, memory_bytes_per_s=1e9)

    def floor(states):
        return step_floor_s(
            model_of_size(10**9),
            layout=Layout(device="cuda"),
            cluster=cluster,
            counts=BatchCounts.of([1], image_patches=[], num_head_tokens=1),
            num_micro_batches=1,
            states=states,
        )

    # Of vectors, which Muon leaves to AdamW: 28 bytes, and 12 of the mean.
    assert floor(States()) == pytest.approx(28)
    assert floor(MUON) == pytest.approx(28)
    assert floor(MEAN) == pytest.approx(40)


@pytest.mark.parametrize("engine", ["fsdp2", "zero"])
def test_muon_is_refused_where_matrices_are_shared_out(engine):
    found = refusal(Layout(engine=engine, shard=2), states=MUON)
    assert found is not None
    assert f"engine {engine} shares weights out; use engine ddp, or set kind to adamw" in found
    assert refusal(Layout(dp=2), states=MUON) is None


def test_a_mean_on_a_disk_is_refused():
    fields = {"stage": 3, "optimizer": {"to": "nvme", "path": "/nvme"}}
    layout = Layout.model_validate({"engine": "zero", "zero": fields})
    assert "train.ema_decay keeps" in (refusal(layout, states=MEAN) or "")
    assert refusal(layout, states=States()) is None


def test_a_plan_for_muon_has_no_engine_that_cannot(starter_shape, cpus, sample_costs):
    plan = search(starter_shape, cpus(2), sample_costs, ScheduleSpec(), LayoutParams(), "muon")
    assert {each.layout.engine for each in plan.predictions if not each.refused} == {"ddp"}
    whys = [each.refused for each in plan.predictions if each.layout.engine == "fsdp2"]
    assert whys
    assert all("train.optimizer.kind is muon" in why for why in whys)
    params = LayoutParams(engine="fsdp2", num_processes=2)
    with pytest.raises(LayoutError, match=r"kind is muon, whose update"):
        search(starter_shape, cpus(2), sample_costs, ScheduleSpec(), params, "muon")


def test_a_plan_counts_the_mean_and_refuses_rates_of_what_is_not_there(
    starter_shape, cpus, sample_costs
):
    given = (starter_shape, cpus(1), sample_costs, ScheduleSpec(), LayoutParams())
    without, having = search(*given), search(*given, ema_decay=0.999)
    for plain, more in zip(without.predictions, having.predictions, strict=True):
        assert more.held_bytes - plain.held_bytes == 4 * starter_shape.num_parameters
    with pytest.raises(ConfigError, match=r"towers has head, of which nothing trains"):
        search(*given, towers={"head": TowerRates(lr=1.0)})
