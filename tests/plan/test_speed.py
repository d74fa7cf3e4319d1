import pytest

from diptych.core.records import Layout
from diptych.plan.speed import step_floor_s
from diptych.shape.counts import BatchCounts
from diptych.shape.flops import forward_flops, train_flops

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
    flops = train_flops(shape, counts=COUNTS)
    floor = step_floor_s(
        shape,
        layout=Layout(device="cuda"),
        cluster=cluster,
        counts=COUNTS,
        num_micro_batches=1,
    )
    assert floor == pytest.approx(flops / 67e12 + 196e9 / 3.35e12)


@pytest.mark.parametrize(
    ("rates", "fields", "used"),
    [
        ({"bf16": 2.0, "fp32": 1.0}, {"precision": "bf16"}, 2.0),
        # Tensor cores multiply both halves alike, where they know bf16.
        ({"bf16": 2.0, "fp32": 1.0}, {"precision": "fp16"}, 2.0),
        ({"fp16": 3.0, "fp32": 1.0}, {"precision": "fp16"}, 3.0),
        ({"fp32": 1.0}, {"precision": "fp16"}, None),
        # The fastest of them, for the floor has to be one.
        (
            {"bf16": 2.0, "fp32": 1.0},
            {"precision": "bf16", "mixed_precision": {"towers": {"vision": "fp32"}}},
            2.0,
        ),
        ({"bf16": 2.0}, {"precision": "bf16", "mixed_precision": {"fp8": ["language"]}}, 4.0),
    ],
)
def test_floor_takes_the_rate_of_the_precision(model_of_size, gpus, rates, fields, used):
    shape = model_of_size(GB)
    floor = step_floor_s(
        shape,
        layout=Layout(device="cuda", **fields),
        cluster=gpus("a GPU", 80 * GB, num_devices=1, flops_per_s=rates),
        counts=COUNTS,
        num_micro_batches=1,
    )
    whole = train_flops(shape, counts=COUNTS)
    assert floor == (None if used is None else pytest.approx(whole / used))


@pytest.mark.parametrize(
    ("frozen", "language", "attention", "head", "vision", "connector"),
    [
        # A merger begins with a norm, whose weights train.
        (("vision",), 3, 3, 3, 1, 3),
        (("vision", "connector"), 3, 3, 3, 1, 1),
        # Gradients pass through a frozen language model to what trains before it.
        (("language",), 2, 3, 2, 3, 3),
        (("vision", "language"), 2, 3, 2, 1, 3),
        (("vision", "connector", "language"), 1, 1, 1, 1, 1),
    ],
)
def test_frozen_towers_cost_less(
    starter_shape, frozen, language, attention, head, vision, connector
):
    """The starter's head is the embedding, which is the language model's."""
    counts = BatchCounts.of([50] * 4, image_patches=[48] * 4, num_head_tokens=20)
    text = BatchCounts.of([50] * 4, image_patches=[], num_head_tokens=20)
    whole = forward_flops(starter_shape, counts=counts)
    written = forward_flops(starter_shape, counts=text)
    # Two mergers, each of 48 tokens of four patches: 512 x 512, then 512 x 128.
    merged = 2 * 48 * 2 * (512 * 512 + 512 * 128)
    seen = whole.vision - merged + whole.attention - written.attention
    expected = (
        language * whole.language
        + attention * written.attention
        + head * whole.head
        + vision * seen
        + connector * merged
    )
    if vision == 3:
        # The pixels ask for no gradient: 192 patches of 3 x 2 x 8 x 8 by a width of 128.
        expected -= 2 * 192 * 384 * 128
    shape = freeze(starter_shape, frozen=frozen)
    assert train_flops(shape, counts=counts) == pytest.approx(expected)
    # One tensor that trains makes its tower one that trains.
    first = next(each for each in shape.parameters if each.tower == frozen[0])
    some = freeze(starter_shape, frozen=frozen, but=first.name)
    assert first.tower not in some.frozen
    assert train_flops(some, counts=counts) > train_flops(shape, counts=counts)


def freeze(shape, *, frozen, but=""):
    """Freeze towers, but for one parameter."""
    parameters = tuple(
        each.model_copy(update={"trains": each.tower not in frozen or each.name == but})
        for each in shape.parameters
    )
    return shape.model_copy(update={"parameters": parameters})


def test_offloaded_states_are_not_updated_on_the_device(model_of_size, gpus):
    cluster = gpus(
        "a GPU", 80 * GB, num_devices=2, flops_per_s={"fp32": 1e30}, memory_bytes_per_s=1e9
    )

    def floor(**options):
        return step_floor_s(
            model_of_size(GB),
            layout=Layout(device="cuda", engine="fsdp2", shard=2, fsdp=options),
            cluster=cluster,
            counts=COUNTS,
            num_micro_batches=1,
        )

    # 28 bytes for each of half the parameters at 1 GB/s.
    assert floor() == pytest.approx(14)
    assert floor(offload=True) == pytest.approx(0, abs=1e-9)
