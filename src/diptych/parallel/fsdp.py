"""Sharded weights, gradients and optimizer state: FSDP2's `fully_shard`, group by group.

A module, its units and a layout flow in; the module is changed in place. A group is what is
gathered and reduced together: a unit, or a layer of a class that the layout names; the rest
(embedding and head together, for they may be tied) is the root's. What computes in another dtype
than the root is a group of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from diptych.core.errors import LayoutError, nearest
from diptych.core.records import Dtype, Layout, TowerName
from diptych.model.families import Unit, layer_classes
from diptych.parallel import precision
from diptych.parallel.precision import Piece


def shard(
    module: nn.Module,
    *,
    model: nn.Module,
    units: Sequence[Unit],
    mesh: DeviceMesh,
    layout: Layout,
) -> Callable[[bool], AbstractContextManager[None]]:
    """Shard each group, innermost first, then what is left in the root.

    Returns:
        The context of one micro-batch: gradients stay whole and local until the last one, or are
        reduced every time (less memory, more bytes) when the layout says `every`.

    Raises:
        LayoutError: a class to wrap is not in the model, or tied weights get two dtypes.
    """
    options: dict[str, Any] = {
        "mesh": mesh if layout.dp > 1 else mesh["shard"],
        "offload_policy": _offload(layout),
    }
    norms = None
    if "norms" in layout.mixed_precision.keep_fp32:
        norms = _shard_norms(model, layout=layout, options=options)
    for group in _groups(model, units=units, layout=layout):
        fully_shard(
            group.module,
            mp_policy=_policy(group, layout=layout),
            reshard_after_forward=layout.fsdp.gather == "twice",
            **options,
        )
    base = precision.base_dtype(layout)
    casts_inputs = not precision.is_mixed(layout)
    root = fully_shard(
        module,
        mp_policy=precision.policy(layout, dtype=base, casts_inputs=casts_inputs),
        **options,
    )
    if norms is not None:
        # After FSDP2's own hook, which comes first.
        module.register_forward_pre_hook(lambda *_: norms.unshard())
    _prefetch(root, groups=_in_order(module), layout=layout)

    @contextmanager
    def accumulate(last: bool) -> Iterator[None]:
        root.set_requires_gradient_sync(last or layout.grad_sync == "every")
        root.set_is_last_backward(last)
        yield

    return accumulate


def reshard(module: nn.Module) -> None:
    """Free what is gathered, so that a module's parameters are the shards that are trained.

    A forward without a backward (held-out samples) leaves the root's weights whole.
    """
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def _groups(model: nn.Module, *, units: Sequence[Unit], layout: Layout) -> list[Piece]:
    """List what is sharded on its own, innermost first."""
    if layout.fsdp.wrap:
        groups = _named_layers(model, units=units, layout=layout)
    else:
        blocks = [unit for unit in units if unit.is_block]
        groups = [Piece(name=each.name, module=each.module, tower=each.tower) for each in blocks]
    if precision.is_mixed(layout):
        chosen = {group.name for group in groups}
        apart = _apart_from_root(model, units=units, layout=layout)
        groups += [piece for piece in apart if piece.name not in chosen]
    # A module's name is the beginning of its children's names.
    return sorted(groups, key=lambda group: -group.name.count("."))


def _apart_from_root(model: nn.Module, *, units: Sequence[Unit], layout: Layout) -> Iterator[Piece]:
    """List what the root cannot hold where towers differ: all but the language model's rest."""
    base = precision.base_dtype(layout)
    own_head = precision.tower_dtype(layout, tower="head") != base
    if own_head and _tied(model):
        raise LayoutError(
            "The head's weights are the embedding's, and FSDP2 gathers both in one dtype",
            allowed=f"The language model's, {base}",
            cure="Give mixed_precision.towers the same dtype for head and language, or untie them",
        )
    stays = {"language"} if own_head else {"language", "head"}
    for piece in precision.pieces(model, units=units):
        if piece.tower not in stays:
            yield piece


def _named_layers(model: nn.Module, *, units: Sequence[Unit], layout: Layout) -> list[Piece]:
    """List the layers whose class the layout names."""
    classes = layer_classes(model)
    for name in layout.fsdp.wrap:
        if name not in classes:
            raise LayoutError(
                f"The model has no layer of class '{name}' that can be sharded on its own",
                cure=nearest(name, allowed=classes),
            )
    pieces = list(precision.pieces(model, units=units))
    found = []
    for name, module in model.named_modules():
        if type(module).__name__ in layout.fsdp.wrap:
            towers: list[TowerName] = [
                piece.tower for piece in pieces if _overlaps(piece.name, name)
            ]
            # A layer around towers of several dtypes is none: each part of it is a group then.
            if len({precision.tower_dtype(layout, tower=tower) for tower in towers}) == 1:
                found.append(Piece(name=name, module=module, tower=towers[0]))
    return found


def _overlaps(name: str, other: str) -> bool:
    """Whether one module is the other, or holds it."""
    return f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.")


def _shard_norms(model: nn.Module, *, layout: Layout, options: dict[str, Any]) -> FSDPModule | None:
    """Make one group of all norms' weights, in fp32; None where there are none.

    They are few: one gather serves a whole forward and backward pass. Hooks around each norm would
    run inside of blocks, where recompute and compile want nothing but the block; so the root
    gathers them as its forward begins, and reduces their gradients as its backward ends.
    """
    found = [norm for norm in precision.norms(model) if next(norm.parameters(), None) is not None]
    if not found:
        return None
    fully_shard(
        found,
        mp_policy=precision.policy(layout, dtype="fp32"),
        reshard_after_forward=False,
        **options,
    )
    group = cast(FSDPModule, found[0])
    state = group._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    return group


def _policy(group: Piece, *, layout: Layout) -> MixedPrecisionPolicy:
    return precision.policy(layout, dtype=_dtype(group, layout=layout))


def _dtype(group: Piece, *, layout: Layout) -> Dtype:
    return precision.tower_dtype(layout, tower=group.tower)


def _offload(layout: Layout) -> OffloadPolicy:
    if not layout.fsdp.offload:
        return OffloadPolicy()
    # Ranks on a CPU hold everything in the host's memory; there is nothing to pin it for.
    return CPUOffloadPolicy(pin_memory=layout.fsdp.pin_memory and layout.device == "cuda")


def _tied(model: nn.Module) -> bool:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return len(names) > sum(1 for _ in model.named_parameters())


def _in_order(module: nn.Module) -> list[FSDPModule]:
    """List the groups below the root as they run forward; norms are gathered with the root."""
    return [
        each
        for each in module.modules()
        if isinstance(each, FSDPModule) and each is not module and not precision.is_norm(each)
    ]


def _prefetch(root: FSDPModule, *, groups: Sequence[FSDPModule], layout: Layout) -> None:
    """Say which groups are gathered ahead of the running one.

    Forward, 0 leaves it to FSDP2: a group is gathered as soon as its forward is called, which on a
    GPU overlaps with the one that still computes; n gathers n groups when one begins. Backward, 1
    is FSDP2's own: the group that ran before; 0 gathers nothing ahead; n gathers n groups.
    """
    ahead, behind = layout.fsdp.prefetch_forward, layout.fsdp.prefetch_backward
    order = [root, *groups]
    if ahead:
        for number, group in enumerate(order):
            group.set_modules_to_forward_prefetch(order[number + 1 : number + 1 + ahead])
    if behind == 1:
        return
    trained = [group for group in groups if _trains(group)]
    back = [root, *reversed(trained)]
    for number, group in enumerate(back):
        # A list of itself asks for nothing; an empty one would be FSDP2's own order.
        group.set_modules_to_backward_prefetch(back[number + 1 : number + 1 + behind] or [group])


def _trains(group: FSDPModule) -> bool:
    return any(each.requires_grad for each in cast(nn.Module, group).parameters())
