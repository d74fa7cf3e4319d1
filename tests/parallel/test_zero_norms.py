"""Gradient norms by tower under ZeRO are those of plain torch, and make up the whole norm."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch

from diptych.core.records import (
    Layout,
    LossScale,
    MixedPrecision,
    OptimizerSpec,
    ParameterOffload,
    TowerRates,
)
from tests.conftest import TINY_MODEL
from tests.parallel.small import IMAGE, TOKENS, make_inputs, spread_model
from tests.parallel.zero_toy import CPU, zero

TOWERS = {
    "model.visual.merger.": "connector",
    "model.visual.deepstack_merger_list.": "connector",
    "model.visual.": "vision",
    "model.language_model.": "language",
    "lm_head.": "head",
}
SCALED = MixedPrecision(loss_scale=LossScale(initial=4.0))
MODEL = TINY_MODEL.model_copy(update={"tie_word_embeddings": False})
BY_TOWER = {"language": TowerRates(lr=1e-4), "connector": TowerRates(lr=3e-4)}


def norms_of(layout, *, num_steps=2, num_micro_batches=2, towers=None, frozen=(), poison=None):
    from diptych.train.optimizers import build_optimizer

    spec = OptimizerSpec(towers=towers or {})
    engine = spread_model(
        layout,
        spec=MODEL.model_copy(update={"freeze": frozen}),
        build=partial(build_optimizer, spec=spec),
    )
    updates = []
    for step in range(num_steps):
        for number in range(num_micro_batches):
            with engine.micro_batch(is_last=number == num_micro_batches - 1), engine.autocast():
                loss, _ = engine.module(**make_inputs(10 * step + number))
            factor = poison if poison is not None and step == 0 else 1.0
            engine.backward(loss * factor, weight=1 / 50)
        # The rate is none, so every step's gradient is one of the same weights.
        updates.append(engine.update(lr=0.0, max_grad_norm=0.1))
    engine.close()
    return updates


def plain_norms(num_ranks, *, num_steps=2, num_micro_batches=2, frozen=()):
    """Take the norms in one process, of the gradient of all ranks' rows, by parameters' names."""
    from diptych.model import assemble
    from diptych.train.step import LossModule

    model = assemble.build(MODEL, tokens=TOKENS, image=IMAGE, seed=5)
    module = LossModule(model)
    found = []
    for step in range(num_steps):
        model.zero_grad()
        for number in range(num_micro_batches):
            for rank in range(num_ranks):
                loss, _ = module(**make_inputs(10 * step + number, rank=rank))
                (loss / 50).backward()
        squares: dict[str, float] = {}
        for name, parameter in model.named_parameters():
            tower = next(tower for prefix, tower in TOWERS.items() if name.startswith(prefix))
            if tower not in frozen and parameter.grad is not None:
                square = float(parameter.grad.double().square().sum())
                squares[tower] = squares.get(tower, 0.0) + square
        found.append({tower: math.sqrt(square) for tower, square in squares.items()})
    return found


def check(found, *, wanted, rtol):
    assert len(found) == len(wanted)
    for update, norms in zip(found, wanted, strict=True):
        assert update.applied
        assert update.grad_norm_by_tower == pytest.approx(norms, rel=rtol)
        combined = math.sqrt(sum(norm**2 for norm in update.grad_norm_by_tower.values()))
        assert combined == pytest.approx(update.grad_norm, rel=1e-5)


@pytest.fixture(scope="module")
def plain():
    wanted = plain_norms(2)
    assert set(wanted[0]) == set(TOWERS.values())
    # Steps and towers differ, or what is taken for another would not show.
    norms = sorted(norm for each in wanted for norm in each.values())
    assert all(b > 1.001 * a for a, b in pairwise(norms))
    return wanted


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 1},
        {"stage": 2},
        {"stage": 3},
        {"stage": 1, "optimizer": CPU},
        {"stage": 2, "optimizer": CPU},
        {"stage": 3, "optimizer": CPU, "parameters": ParameterOffload(to="cpu")},
        {"stage": 2, "contiguous_gradients": False, "reduce_bucket_elements": 600},
        {"stage": 3, "persistence_threshold_elements": 0},
    ],
    ids=str,
)
def test_they_are_plain_torchs(options, ranks, plain):
    for found in ranks(2).run(norms_of, layout=zero(**options)):
        check(found, wanted=plain, rtol=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_groups_of_parameters_that_cut_across_towers_do_not_matter(stage, ranks):
    """Rates by tower make more groups; three ranks' partitions end within parameters."""
    layout, frozen = zero(stage, ranks=3), ("vision",)
    found = ranks(3).run(norms_of, layout=layout, towers=BY_TOWER, frozen=frozen)[0]
    wanted = plain_norms(3, frozen=frozen)
    assert set(wanted[0]) == {"connector", "language", "head"}
    check(found, wanted=wanted, rtol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_in_lower_precision_they_have_no_loss_scale(stage, precision, ranks, plain):
    layout = zero(stage, precision=precision, mixed=SCALED)
    check(ranks(2).run(norms_of, layout=layout)[0], wanted=plain, rtol=3e-2)


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ({"stage": 1}, "fp32"),
        ({"stage": 1}, "bf16"),
        ({"stage": 2}, "fp16"),
        ({"stage": 2, "optimizer": CPU}, "fp32"),
        ({"stage": 3}, "bf16"),
        ({"stage": 3, "optimizer": CPU}, "fp32"),
    ],
    ids=str,
)
def test_a_step_that_is_skipped_has_none(options, precision, ranks):
    layout = zero(**options, precision=precision, mixed=SCALED)
    for skipped, later in ranks(2).run(norms_of, layout=layout, poison=math.nan):
        assert (skipped.applied, skipped.grad_norm_by_tower) == (False, {})
        assert later.applied
        assert set(later.grad_norm_by_tower) == set(TOWERS.values())


def test_the_native_engines_say_the_same(ranks, plain):
    found = ranks(2).run(norms_of, layout=Layout(engine="ddp", dp=2))[0]
    check(found, wanted=plain, rtol=1e-5)


def test_they_take_one_exchange_a_step(ranks):
    """DeepSpeed alone takes one for each group of parameters."""
    for counts in ranks(2).run(_count_exchanges, layout=zero(3), towers=BY_TOWER):
        assert counts == [4 * 8] * 2


def _count_exchanges(layout, *, towers):
    """Count the bytes of all-reduces of float64, which nothing but norms is in."""
    import torch.distributed as dist

    sent = []
    plain = dist.all_reduce

    def counting(tensor, *arguments, **options):
        if tensor.dtype == torch.double:
            sent.append(tensor.nbytes)
        return plain(tensor, *arguments, **options)

    dist.all_reduce = counting
    try:
        norms_of(layout, towers=towers)
    finally:
        dist.all_reduce = plain
    return sent
