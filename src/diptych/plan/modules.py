"""Why a layout cannot run with what a model is made of: its batch norms, its blocks, its patches.

In: a layout and a model's shape. Out: a reason with what is allowed and what to do, or None. It
knows neither the machine nor the data.
"""

from __future__ import annotations

from diptych.core.records import Layout, ModelShape
from diptych.shape.families import family

_NUM_NAMED = 3


def refusal(layout: Layout, *, model_shape: ModelShape, num_micro_batches: int) -> str | None:
    """Return the first reason why a layout cannot run with a model, None if there is none."""
    return (
        _batch_norms(layout, model_shape=model_shape, num_micro_batches=num_micro_batches)
        or _compile(layout)
        or _patches(layout, model_shape=model_shape)
    )


def _batch_norms(layout: Layout, *, model_shape: ModelShape, num_micro_batches: int) -> str | None:
    names = model_shape.batch_norms
    if not names or layout.batch_norm == "frozen":
        return None
    named = ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")
    found = f"the model has {len(names)} batch norm(s) ({named})"
    if layout.batch_norm == "refuse":
        return (
            f"{found}, whose statistics would be those of one rank's micro-batch; set "
            "plan.layout.batch_norm to frozen (they keep the statistics that they came with), or "
            "to sync (those of all ranks: on GPUs, one micro-batch a step)"
        )
    unshared = _unshared_statistics(
        layout, model_shape=model_shape, num_micro_batches=num_micro_batches
    )
    return f"{found}, and {unshared}" if unshared else None


def _unshared_statistics(
    layout: Layout, *, model_shape: ModelShape, num_micro_batches: int
) -> str | None:
    """Say why batch norms cannot take the statistics of all ranks."""
    if layout.device != "cuda":
        return "batch_norm sync works on GPUs only; set it to frozen"
    if layout.engine == "zero":
        return (
            "zero's checkpoints do not hold the statistics of batch_norm sync; use "
            "engine ddp or fsdp2, or set batch_norm to frozen"
        )
    if num_micro_batches > 1:
        return (
            f"with {num_micro_batches} micro-batches a step batch_norm sync would see "
            "a part of the global batch at a time; raise micro_batch until a rank's share is one "
            "micro-batch, or set batch_norm to frozen"
        )
    recomputed = _recomputed_towers(layout) & {
        _tower(name, model_shape=model_shape) for name in model_shape.batch_norms
    }
    if recomputed:
        return (
            f"recomputing the {', '.join(sorted(recomputed))} would count every batch "
            "twice; set memory.recompute to none, or batch_norm to frozen"
        )
    return None


def _recomputed_towers(layout: Layout) -> set[str]:
    memory = layout.memory
    if memory.recompute == "none":
        return set()
    chosen = {
        "vision": memory.vision_every > 0,
        "language": memory.language_every > 0,
        "connector": memory.recompute_connector,
    }
    return {tower for tower, is_chosen in chosen.items() if is_chosen}


def _tower(name: str, *, model_shape: ModelShape) -> str:
    return family(model_shape.family).anatomy.tower(f"{name}.weight")


def _compile(layout: Layout) -> str | None:
    if not layout.compile.blocks:
        return None
    if layout.engine == "zero" and layout.zero.stage == 3:
        return (
            "compile.blocks is set, and ZeRO 3 gathers weights from within the blocks, where no "
            "graph can hold it; use engine fsdp2 or a lower zero.stage, or set compile.blocks to []"
        )
    if (
        "vision" in layout.compile.blocks
        and layout.memory.recompute == "operators"
        and "vision" in _recomputed_towers(layout)
    ):
        return (
            "compile.blocks names vision and memory.recompute is operators, which needs a block to "
            "be one graph; vision blocks are two, with their attention between: use recompute "
            "blocks, set memory.vision_every to 0, or take vision out of compile.blocks"
        )
    return None


def _patches(layout: Layout, *, model_shape: ModelShape) -> str | None:
    multiple = layout.memory.patch_multiple
    per_token = family(model_shape.family).least_rows(model_shape.sizes)
    if multiple is None or multiple % per_token == 0:
        return None
    return (
        f"memory.patch_multiple is {multiple}, and an image token has {per_token} patches; set it "
        f"to a multiple of {per_token}, or to null"
    )
