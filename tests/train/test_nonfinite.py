"""The module that made the first NaN is named: planted in known places, on one rank or all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from diptych.core.records import (
    CompileOptions,
    ImageSettings,
    Layout,
    MemoryOptions,
    OptimizerSpec,
    TokenIds,
)
from diptych.data.collate import MicroBatch
from diptych.model.assemble import build
from diptych.model.families import units
from diptych.parallel import compiled
from diptych.parallel.mesh import World
from diptych.parallel.spread import spread
from diptych.train.nonfinite import name_nonfinite
from diptych.train.optimizers import build_optimizer
from diptych.train.step import LossModule, run_step
from tests.conftest import TINY_MODEL

TOKENS = TokenIds(num_tokens=500, pad=0, eos=1, image=2, video=3, vision_start=4, vision_end=5)
IMAGE = ImageSettings(patch_px=8, merge=2, temporal_patch=1, min_area_px=256, max_area_px=65536)
LENGTHS = (9, 12)
"""Of the rows of two micro-batches, by which a planted fault tells them apart."""
MLP = "model.language_model.layers.1.mlp"
BLOCK = "model.visual.blocks.1"


def micro_batch(length: int, *, rank: int = 0) -> MicroBatch:
    random = torch.Generator().manual_seed(length + 100 * rank)
    ids = torch.randint(10, 400, (2, length), generator=random)
    ids[0, 1:3] = TOKENS.image
    return MicroBatch(
        input_ids_BS=ids,
        labels_BS=ids.clone(),
        position_ids_3BS=torch.arange(length).expand(3, 2, length),
        segment_ids_BS=None,
        source_ids_BS=torch.zeros((2, length), dtype=torch.int16),
        pixel_values_PD=torch.randn(8, 192, generator=random),
        grid_thw_I3=torch.tensor([[1, 2, 4]]),
        num_rows=2,
        num_samples=2,
        num_label_tokens=2 * length - 2,
        num_text_tokens=2 * length - 2,
        num_image_tokens=2,
        num_patches=8,
        num_slots=2 * length,
        num_samples_by_source=None,
        num_label_tokens_by_source=None,
    )


class BadGradient(torch.autograd.Function):
    """Passes its input on, and makes a NaN on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan")


def overflow(model: nn.Module, *, name: str, length: int = LENGTHS[1]) -> None:
    """Have a module return infinity for rows of one length."""
    module = model.get_submodule(name)
    forward = module.forward

    def overflowing(x: torch.Tensor) -> torch.Tensor:
        return forward(x) * (float("inf") if x.shape[1] == length else 1.0)

    module.forward = overflowing


def bad_gradient(model: nn.Module, *, name: str) -> None:
    module = model.get_submodule(name)
    forward = module.forward
    module.forward = lambda x: BadGradient.apply(forward(x))


def grown(model: nn.Module, *, name: str) -> None:
    """Make what two layers return so large that their product overflows."""
    with torch.no_grad():
        for part in ("gate_proj", "up_proj"):
            model.get_submodule(f"{name}.{part}").weight.mul_(1e25)


def weight(model: nn.Module, *, name: str) -> None:
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = float("nan")


def engine_of(plant: Any, *, layout: Layout, world: World) -> Any:
    model = build(TINY_MODEL, tokens=TOKENS, image=IMAGE, seed=0)
    plant(model)
    return spread(
        LossModule(model),
        model=model,
        units=units(model),
        layout=layout,
        world=world,
        build_optimizer=partial(build_optimizer, spec=OptimizerSpec()),
    )


def world_here() -> World:
    import torch.distributed as dist

    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return World(rank=rank, size=size, device=torch.device("cpu"))


def diagnose(
    plant: Any,
    *,
    layout: Layout = Layout(),  # noqa: B008 - frozen
    change: Any = None,
    only_rank: int | None = None,
) -> str:
    """Run a step that is skipped, and ask why."""
    world = world_here()
    here = only_rank is None or only_rank == world.rank
    engine = engine_of(plant if here else (lambda model: None), layout=layout, world=world)
    batches = [micro_batch(length, rank=world.rank) for length in LENGTHS]
    if change and here:
        change(batches)
    scale = {"engine": engine, "num_label_tokens": 40}
    result = run_step(batches, lr=1e-3, max_grad_norm=1.0, **scale)
    assert not result.update.applied
    return name_nonfinite(
        batches, engine=engine, world=world, num_label_tokens=40, seed=partial(torch.manual_seed, 7)
    )


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (
            partial(weight, name=f"{MLP}.down_proj.weight"),
            f"rank 0: the weight '{MLP}.down_proj.weight' holds NaN",
        ),
        (
            partial(overflow, name=f"{MLP}.down_proj"),
            f"rank 0: in micro-batch 2 Linear '{MLP}.down_proj' made Inf of finite inputs in its "
            "forward pass",
        ),
        (
            partial(grown, name=MLP),
            f"rank 0: in micro-batch 1 Qwen3VLTextMLP '{MLP}' made Inf in its forward pass, before "
            f"it called Linear '{MLP}.down_proj'",
        ),
        (
            partial(bad_gradient, name=f"{BLOCK}.mlp.linear_fc1"),
            f"rank 0: in micro-batch 1 Linear '{BLOCK}.mlp.linear_fc1' made NaN of finite "
            "gradients in its backward pass",
        ),
    ],
)
@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_the_module_is_named(plant, expected, recompute):
    layout = Layout(memory=MemoryOptions(recompute=recompute))
    found = diagnose(plant, layout=layout)
    if "linear_fc1" in expected and "gradient of" in found:
        # The weight's gradient may come first; it is of the same layer.
        assert f"the gradient of '{BLOCK}.mlp.linear_fc1" in found
    else:
        assert found == expected


def test_images_that_are_not_finite_are_named():
    def change(batches):
        batches[1].pixel_values_PD[5, 3] = float("inf")

    found = diagnose(lambda model: None, change=change)
    assert found == "rank 0: in micro-batch 2 the pixel values hold Inf"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_within_a_compiled_block_too():
    def plant(model):
        overflow(model, name=f"{MLP}.down_proj")
        options = CompileOptions(blocks=("language",))
        compiled.apply(units(model), options=options, backend="eager")

    world, batches = world_here(), [micro_batch(length) for length in LENGTHS]
    engine = engine_of(plant, layout=Layout(), world=world)
    run_step(batches, engine=engine, num_label_tokens=40, lr=1e-3, max_grad_norm=1.0)
    before = compiled.num_recompiles()
    found = name_nonfinite(
        batches, engine=engine, world=world, num_label_tokens=40, seed=lambda: None
    )
    assert f"Linear '{MLP}.down_proj' made Inf of finite inputs" in found
    assert compiled.num_recompiles() == before, "hooks must not make graphs of their own"


def test_what_does_not_repeat_is_said():
    engine = engine_of(lambda model: None, layout=Layout(), world=world_here())
    batches = [micro_batch(length) for length in LENGTHS]
    asked = {"world": world_here(), "num_label_tokens": 40, "seed": lambda: None}
    found = name_nonfinite(batches, engine=engine, **asked)
    assert found.startswith("run again, no module made it")


def test_nothing_is_changed():
    engine = engine_of(
        partial(bad_gradient, name=f"{BLOCK}.mlp.linear_fc1"), layout=Layout(), world=world_here()
    )
    before = {name: tensor.clone() for name, tensor in engine.tensors().items()}
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    batches = [micro_batch(length) for length in LENGTHS]
    seed = partial(torch.manual_seed, 7)
    name_nonfinite(batches, engine=engine, world=world_here(), num_label_tokens=40, seed=seed)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, tensor in engine.tensors().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in engine.model.modules()
    )


FSDP = {"engine": "fsdp2", "shard": 2}
DDP = {"engine": "ddp", "dp": 2}


@pytest.mark.parametrize("axes", [DDP, FSDP], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (partial(overflow, name=f"{MLP}.down_proj"), f"Linear '{MLP}.down_proj' made Inf"),
        (partial(bad_gradient, name=f"{BLOCK}.mlp.linear_fc1"), f"'{BLOCK}.mlp.linear_fc1"),
    ],
    ids=["forward", "backward"],
)
def test_a_rank_that_alone_has_it_is_named(axes, plant, expected, ranks):
    """The gradients of all ranks are spoilt by it, so all of them have to ask."""
    found = ranks(2).run(diagnose, plant=plant, layout=Layout(**axes), only_rank=1)
    assert found[0] == found[1]
    assert found[0].startswith("rank 1: in micro-batch ")
    assert expected in found[0]
    assert found[0].endswith("(1 of 2 ranks found something)")


def test_a_sharded_weight_is_looked_at_where_it_lies(ranks):
    plant = partial(weight, name=f"{MLP}.down_proj.weight")
    found = ranks(2).run(diagnose, plant=plant, layout=Layout(**FSDP))
    assert f"rank 0: the weight '{MLP}.down_proj.weight' holds NaN" in found[1]
