import pytest

from diptych.core.records import Layout
from diptych.plan.speed import sent_bytes, step_floor_s
from diptych.shape.families import family
from diptych.shape.flops import BatchCounts

GB = 1_000_000_000
COUNTS = BatchCounts.of([1000] * 8, image_patches=[], num_head_tokens=100)


def test_unknown_rates_give_no_number(model_of_size, gpus):
    floor = step_floor_s(
        model_of_size(GB),
        layout=Layout(device="cuda"),
        cluster=gpus("new", 80 * GB, num_devices=1),
        counts=COUNTS,
        num_micro_batches=1,
    )
    assert floor is None


def test_floor_is_computing_and_updating(model_of_size, gpus):
    """7 B parameters: AdamW moves 28 bytes each, 196 GB at 3.35 TB/s."""
    shape = model_of_size(7 * GB)
    cluster = gpus(
        "H100",
        80 * GB,
        num_devices=1,
        flops_per_s={"fp32": 67e12},
        memory_bytes_per_s=3.35e12,
        link_bytes_per_s=450e9,
    )
    flops = family("qwen3_vl").train_flops(shape.sizes, counts=COUNTS)
    floor = step_floor_s(
        shape,
        layout=Layout(device="cuda"),
        cluster=cluster,
        counts=COUNTS,
        num_micro_batches=1,
    )
    assert floor == pytest.approx(flops / 67e12 + 196e9 / 3.35e12)


@pytest.mark.parametrize(
    ("layout", "num_micro_batches", "sent_gb"),
    [
        (Layout(engine="ddp", dp=1), 1, 0),
        # An all-reduce of 4 GB of gradients over 4 ranks: 2 x 3/4 x 4.
        (Layout(engine="ddp", dp=4), 3, 6),
        # Two gathers of 4 GB and one scatter of 4 GB, 3/4 of each.
        (Layout(engine="fsdp2", shard=4), 1, 9),
        (Layout(engine="fsdp2", shard=4), 2, 15),
        (Layout(engine="fsdp2", shard=4, grad_sync="every"), 2, 18),
        (Layout(engine="fsdp2", shard=4, precision="bf16"), 1, 6),
        # And the shard's gradients, 1 GB, all-reduced over 2 copies.
        (Layout(engine="fsdp2", dp=2, shard=4), 1, 10),
    ],
)
def test_bytes_sent_worked_by_hand(model_of_size, layout, num_micro_batches, sent_gb):
    sent = sent_bytes(model_of_size(GB), layout=layout, num_micro_batches=num_micro_batches)
    assert sent == pytest.approx(sent_gb * GB)
