"""Why torch's own layouts, or a precision, cannot run: a layout, a model's shape, a machine in.

Out: a reason with what was found, what is allowed and what to do, or None. Nothing is started.
"""

from __future__ import annotations

from difflib import get_close_matches

from diptych.core.records import Cluster, EngineName, Layout, ModelShape, Section

_SECTIONS: dict[EngineName, str] = {"ddp": "ddp", "fsdp2": "fsdp", "zero": "zero"}
"""Whose settings each section of a layout holds."""
_BEFORE_FP8 = ("A100", "A10", "A30", "A40", "A6000", "V100", "T4")
"""GPUs of a compute capability below 8.9, by a word of their name."""


def refusal(
    layout: Layout, *, model_shape: ModelShape, cluster: Cluster, num_micro_batches: int
) -> str | None:
    """Return the first reason why a layout cannot run as asked, None if there is none."""
    return (
        _other_engine(layout)
        or _one_rank(layout)
        or _hooks(layout, num_micro_batches=num_micro_batches)
        or _static_graph(layout, num_micro_batches=num_micro_batches)
        or _wrap(layout, model_shape=model_shape)
        or _towers(layout, model_shape=model_shape)
        or _dtypes(layout, cluster=cluster)
        or _fp8(layout, cluster=cluster)
    )


def _other_engine(layout: Layout) -> str | None:
    """Refuse a setting that only another engine reads."""
    for engine, name in _SECTIONS.items():
        section: Section = getattr(layout, name)
        if engine == layout.engine or section == type(section)():
            continue
        changed = [
            field
            for field in type(section).model_fields
            if getattr(section, field) != getattr(type(section)(), field)
        ]
        return (
            f"{name}.{changed[0]} is set, and engine {layout.engine} does not read it; set "
            f"plan.layout.engine to {engine}, or leave {name} as it is by default"
        )
    return None


def _one_rank(layout: Layout) -> str | None:
    if layout.engine != "ddp" or layout.dp > 1:
        return None
    options = layout.ddp
    if options.local_sgd_period is not None:
        return (
            "ddp.local_sgd_period is set, and one rank has no other to average with; use more "
            "processes, or set it to null"
        )
    if options.compression != "none":
        return (
            f"ddp.compression is {options.compression}, and one rank sends nothing; use more "
            "processes, or set it to none"
        )
    return None


def _hooks(layout: Layout, *, num_micro_batches: int) -> str | None:
    """Refuse what does not go with the one hook that DDP has for its buckets."""
    if layout.engine != "ddp":
        return None
    options, reduce = layout.ddp, layout.mixed_precision.reduce
    if options.local_sgd_period is not None:
        hook = "ddp.local_sgd_period"
        if options.compression != "none":
            return (
                f"{hook} and ddp.compression {options.compression} both are DDP's one hook; set "
                "one of them to its default"
            )
    elif options.compression != "none":
        hook = f"ddp.compression {options.compression}"
    else:
        return None
    if reduce not in ("fp32", options.compression):
        return (
            f"mixed_precision.reduce is {reduce}, and {hook} decides what gradients travel in; "
            "set mixed_precision.reduce to fp32"
        )
    if options.compression in ("bf16", "fp16"):
        return None
    if layout.grad_sync == "every" and num_micro_batches > 1:
        return (
            f"{hook} counts optimizer steps, and grad_sync every sends gradients "
            f"{num_micro_batches} times a step; set grad_sync to last"
        )
    if options.compression == "powersgd" and layout.is_fp16:
        return (
            "ddp.compression powersgd adds what it left out to the next step's gradients, and "
            "fp16's loss scale may differ by then; use bf16, or compression fp16"
        )
    return None


def _static_graph(layout: Layout, *, num_micro_batches: int) -> str | None:
    if layout.engine != "ddp" or layout.dp == 1 or not layout.ddp.static_graph:
        return None
    if layout.ddp.find_unused_parameters:
        return (
            "ddp.static_graph finds unused parameters by itself; set ddp.find_unused_parameters "
            "to false"
        )
    if layout.grad_sync == "last" and num_micro_batches > 1:
        return (
            f"ddp.static_graph expects gradients to be sent in the first backward pass, and the "
            f"first of {num_micro_batches} micro-batches keeps them (grad_sync last); set "
            "grad_sync to every, raise micro_batch, or set ddp.static_graph to false"
        )
    return None


def _wrap(layout: Layout, *, model_shape: ModelShape) -> str | None:
    known = model_shape.layer_classes
    for name in layout.fsdp.wrap if known else ():
        if name not in known:
            nearest_first = get_close_matches(name, known, n=len(known), cutoff=0.0)
            return (
                f"fsdp.wrap names '{name}', and no layer of that class can be sharded on its own; "
                f"name one of (nearest first) {', '.join(nearest_first)}"
            )
    return None


def _towers(layout: Layout, *, model_shape: ModelShape) -> str | None:
    """Refuse dtypes of towers that the engine cannot give them."""
    towers = layout.mixed_precision.towers
    if layout.engine == "zero" and any(each != layout.precision for each in towers.values()):
        return (
            "mixed_precision.towers gives a tower another dtype, and DeepSpeed computes the whole "
            "model in one; use engine ddp or fsdp2, or set towers to {}"
        )
    head = towers.get("head", layout.precision)
    language = towers.get("language", layout.precision)
    if layout.engine == "fsdp2" and model_shape.tied_parameters and head != language:
        return (
            f"mixed_precision.towers has the head compute in {head} and the language model in "
            f"{language}, and their weights are tied, so that FSDP2 gathers them as one; give both "
            "the same dtype, or set plan.model.tie_word_embeddings to false"
        )
    if layout.engine == "zero" and "norms" in layout.mixed_precision.keep_fp32:
        return (
            "mixed_precision.keep_fp32 names norms, and DeepSpeed casts every weight of the model; "
            "use engine ddp or fsdp2, or take norms out"
        )
    return None


def _dtypes(layout: Layout, *, cluster: Cluster) -> str | None:
    known = cluster.device.flops_per_s
    used = {layout.precision, *layout.mixed_precision.towers.values()}
    if layout.device == "cuda" and known and "bf16" in used and "bf16" not in known:
        return (
            f"{cluster.device.name} has no bf16; set plan.layout.precision (and "
            "mixed_precision.towers) to fp16 or fp32"
        )
    return None


def _fp8(layout: Layout, *, cluster: Cluster) -> str | None:
    if not layout.mixed_precision.fp8:
        return None
    cure = "set mixed_precision.fp8 to []"
    words = set(cluster.device.name.replace("-", " ").split())
    if layout.device == "cpu" or words.intersection(_BEFORE_FP8):
        return (
            f"{cluster.device.name} does not compute in fp8; it takes a GPU of compute capability "
            f"8.9 (Ada, Hopper) or later: {cure}"
        )
    if layout.engine == "zero":
        return f"mixed_precision.fp8 is built for engine ddp and fsdp2; use one of them, or {cure}"
    return None
