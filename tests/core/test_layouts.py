"""What is not the default is said, and nothing else."""

from __future__ import annotations

import pytest

from diptych.core.errors import LayoutError
from diptych.core.layouts import fit_layout, options_of, set_of
from diptych.core.records import (
    CompileOptions,
    DdpOptions,
    FsdpOptions,
    Layout,
    LossScale,
    MemoryOptions,
    MixedPrecision,
    OptimizerOffload,
    Section,
    ZeroOptions,
)


class Asked(Section):
    """Settings as `plan.layout` has them."""

    rows: int = 1
    device: str = "auto"
    memory: MemoryOptions = MemoryOptions()


def test_defaults_are_not_said() -> None:
    assert options_of(Layout()) == ()
    assert options_of(Layout(engine="fsdp2", shard=4, precision="bf16")) == ()


def test_what_was_set_is_said() -> None:
    layout = Layout(
        engine="ddp",
        dp=2,
        precision="bf16",
        batch_norm="frozen",
        attention="flex",
        ddp=DdpOptions(compression="powersgd", gradient_as_bucket_view=False),
        mixed_precision=MixedPrecision(towers={"vision": "fp32", "head": "bf16"}),
        memory=MemoryOptions(recompute="blocks", patch_multiple=64),
        compile=CompileOptions(blocks=("vision", "language")),
    )
    assert options_of(layout) == (
        "batch_norm frozen",
        "attention flex",
        "ddp.gradient_as_bucket_view false",
        "ddp.compression powersgd",
        "mixed_precision.towers head=bf16+vision=fp32",
        "memory.recompute blocks",
        "memory.patch_multiple 64",
        "compile.blocks vision+language",
    )


def test_settings_that_are_not_the_default_are_named_by_their_path() -> None:
    assert set_of(Asked(), path="plan") == ()
    asked = Asked(rows=4, memory=MemoryOptions(recompute="blocks", token_multiple=8))
    assert set_of(asked, path="plan") == (
        "plan.rows 4",
        "plan.memory.recompute blocks",
        "plan.memory.token_multiple 8",
    )


def test_only_the_engine_that_runs_is_described() -> None:
    fsdp = FsdpOptions(gather="once", offload=True)
    assert options_of(Layout(engine="ddp", fsdp=fsdp)) == ()
    assert options_of(Layout(engine="fsdp2", shard=2, fsdp=fsdp)) == (
        "fsdp.gather once",
        "fsdp.offload true",
    )


def test_the_stage_of_zero_is_always_said() -> None:
    layout = Layout(engine="zero", shard=2)
    assert options_of(layout) == ("zero.stage 2",)
    offload = ZeroOptions(stage=3, optimizer=OptimizerOffload(to="cpu"))
    said = options_of(layout.model_copy(update={"zero": offload}))
    assert said == ("zero.stage 3", "zero.optimizer.to cpu")


def test_the_loss_scale_is_said_where_there_is_one() -> None:
    scaled = MixedPrecision(loss_scale=LossScale(initial=1024))
    assert options_of(Layout(mixed_precision=scaled)) == ()
    assert options_of(Layout(precision="fp16", mixed_precision=scaled)) == (
        "mixed_precision.loss_scale.initial 1024",
    )


@pytest.mark.parametrize(
    ("layout", "world_size", "axes"),
    [
        (Layout(engine="ddp", dp=4), 2, (2, 1)),
        (Layout(engine="ddp", dp=4), 6, (6, 1)),
        (Layout(engine="fsdp2", shard=4), 2, (1, 2)),
        (Layout(engine="fsdp2", shard=4), 8, (1, 8)),
        (Layout(engine="zero", shard=4), 1, (1, 1)),
        # Copies of a model that is sharded over four ranks: two of them, three, one over six.
        (Layout(engine="fsdp2", dp=3, shard=4), 8, (2, 4)),
        (Layout(engine="fsdp2", dp=2, shard=4), 12, (3, 4)),
        (Layout(engine="fsdp2", dp=2, shard=4), 6, (1, 6)),
        (Layout(engine="ddp", dp=4, tp=2), 4, (2, 1)),
    ],
)
def test_a_layout_fits_other_numbers_of_ranks(layout, world_size, axes) -> None:
    fitted = fit_layout(layout, world_size=world_size)
    assert (fitted.dp, fitted.shard) == axes
    assert fitted.world_size == world_size
    assert fitted.model_copy(update={"dp": layout.dp, "shard": layout.shard}) == layout


def test_ranks_that_no_model_fits_on_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"3 ranks cannot run .* A multiple of 2 ranks"):
        fit_layout(Layout(engine="ddp", dp=2, tp=2), world_size=3)
