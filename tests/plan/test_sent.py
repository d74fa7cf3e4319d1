"""Bytes sent in a step, worked by hand; real ranks are counted in `tests/parallel/test_held.py`."""

import pytest

from diptych.core.records import Layout, ModelShape, Parameter
from diptych.plan.sent import sent_bytes

GB = 1_000_000_000
STAGE = {stage: {"engine": "zero", "shard": 4, "zero": {"stage": stage}} for stage in (1, 2, 3)}


@pytest.mark.parametrize(
    ("layout", "num_micro_batches", "sent_gb"),
    [
        (Layout(engine="ddp", dp=1), 1, 0),
        # An all-reduce of 4 GB of gradients over 4 ranks: 2 x 3/4 x 4.
        (Layout(engine="ddp", dp=4), 3, 6),
        (Layout(engine="ddp", dp=4, grad_sync="every"), 3, 18),
        (Layout(engine="ddp", dp=4, ddp={"compression": "fp16"}), 3, 3),
        (Layout(engine="ddp", dp=4, mixed_precision={"reduce": "bf16"}), 3, 3),
        # All weights once in ten steps, and no gradients.
        (Layout(engine="ddp", dp=4, ddp={"local_sgd_period": 10}), 3, 0.6),
        # Two gathers of 4 GB and one scatter of 4 GB, 3/4 of each.
        (Layout(engine="fsdp2", shard=4), 1, 9),
        (Layout(engine="fsdp2", shard=4), 2, 15),
        (Layout(engine="fsdp2", shard=4, fsdp={"gather": "once"}), 2, 9),
        (Layout(engine="fsdp2", shard=4, grad_sync="every"), 2, 18),
        (Layout(engine="fsdp2", shard=4, precision="bf16"), 1, 6),
        (
            Layout(engine="fsdp2", shard=4, precision="bf16", mixed_precision={"reduce": "bf16"}),
            1,
            4.5,
        ),
        # And the shard's gradients, 1 GB, all-reduced over 2 copies.
        (Layout(engine="fsdp2", dp=2, shard=4), 1, 10),
        # ZeRO 1 and 2 reduce gradients to everyone, then gather the weights.
        (Layout(**STAGE[1]), 2, 6 + 3),
        (Layout(**STAGE[2]), 2, 12 + 3),
        (Layout(**STAGE[1], precision="bf16"), 2, 6 + 1.5),
        # ZeRO 3 keeps weights that are used again before 1 G elements have passed: the last half.
        (Layout(**STAGE[3]), 2, 2 * (3 * 1.5 + 3)),
    ],
)
def test_bytes_sent_worked_by_hand(model_of_size, layout, num_micro_batches, sent_gb):
    sent = sent_bytes(model_of_size(GB), layout=layout, num_micro_batches=num_micro_batches)
    assert sent == pytest.approx(sent_gb * GB)


def listed(*parameters, frozen=()):
    """A model of parameters given as (tower, block, shape); `frozen` has towers and blocks."""
    return ModelShape(
        family="qwen3_vl",
        parameters=tuple(
            Parameter(
                name=f"{tower}.{block or 'rest'}.{number}.weight",
                shape=shape,
                dtype="float32",
                tower=tower,
                block=block,
                trains=not {tower, block} & set(frozen),
            )
            for number, (tower, block, shape) in enumerate(parameters)
        ),
        sizes={},
        tied_parameters={},
    )


def test_the_root_is_gathered_once():
    shape = listed(("language", "", (4, 100)), ("language", "l0", (4, 10)))
    sent = sent_bytes(shape, layout=Layout(engine="fsdp2", shard=4), num_micro_batches=1)
    assert sent == 3 / 4 * 4 * ((400 + 2 * 40) + (400 + 40))


def test_padding_is_sent():
    """5 rows over 4 ranks are 2 rows on each: 8 rows."""
    shape = listed(("language", "l0", (5, 10)))
    sent = sent_bytes(shape, layout=Layout(engine="fsdp2", shard=4), num_micro_batches=1)
    assert sent == 3 / 4 * 4 * 3 * 80


def test_frozen_blocks_are_gathered_for_the_forward_pass():
    """FSDP2 fetches the last of them once more, unless it is told what to fetch."""
    parameters = [("vision", f"v{i}", (4, 10)) for i in range(3)] + [("language", "l0", (4, 10))]
    shape = listed(*parameters, frozen=("vision",))

    def num_passes(num_micro_batches=1, **options):
        layout = Layout(engine="fsdp2", shard=4, fsdp=options)
        sent = sent_bytes(shape, layout=layout, num_micro_batches=num_micro_batches)
        return sent / (3 / 4 * 4 * 40)

    assert num_passes() == 3 + 2 + 1 + 1
    # What was fetched in vain is there for the next micro-batch.
    assert num_passes(2) == 2 * (3 + 2) + 1 + 1
    assert num_passes(prefetch_backward=2) == 3 + 2 + 1
    assert num_passes(gather="once") == 4 + 1


def test_frozen_blocks_behind_one_that_trains_are_gathered_twice():
    """Of four blocks the second trains: a gradient passes through the last two, not the first."""
    parameters = [("language", f"l{i}", (4, 10)) for i in range(4)]
    shape = listed(*parameters, frozen=("l0", "l2", "l3"))
    layout = Layout(engine="fsdp2", shard=4, fsdp={"prefetch_backward": 2})
    sent = sent_bytes(shape, layout=layout, num_micro_batches=1)
    assert sent == 3 / 4 * 4 * 40 * ((1 + 2 + 2 + 2) + 1)


def test_powersgd_sends_factors_of_matrices():
    """100 x 50 at rank 2 is 300 elements; a bias, and 4 x 4, are no smaller in factors."""
    shape = listed(
        ("language", "l0", (100, 50)), ("language", "l0", (100,)), ("language", "l0", (4, 4))
    )
    options = {"compression": "powersgd", "powersgd_rank": 2}
    sent = sent_bytes(shape, layout=Layout(dp=2, ddp=options), num_micro_batches=1)
    assert sent == 2 * 1 / 2 * 4 * (300 + 100 + 16)
