"""Which module made a NaN: a step whose gradient was not finite runs once more, watched.

In: the step's micro-batches and the engine that ran them. Out: one sentence, the same on every
rank. Weights, optimizer and random streams are left as they were; the gradient is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import astuple, dataclass, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from diptych.data.collate import MicroBatch
from diptych.parallel import compiled
from diptych.parallel.engine import Engine
from diptych.parallel.mesh import World, gather_numbers
from diptych.train.step import forward, labels_per_pair

_LOG = logging.getLogger(__name__)
_KINDS = ("nothing", "NaN", "Inf")

_PARAMETER, _PIXELS, _OUTPUT, _BETWEEN, _LOSS, _REACHING, _BACKWARD, _WEIGHT = range(8)


@dataclass(frozen=True)
class _Found:
    """The first number that was not finite, as numbers that ranks can exchange.

    Attributes:
        kind: index into `_KINDS`; 0: all was finite.
        place: what it was found in, one of the constants above.
        micro_batch: of this rank's, from 1.
        module: index into the model's modules, or into its tensors.
        parent: index of the module that called it.
    """

    kind: int = 0
    place: int = 0
    micro_batch: int = 0
    module: int = 0
    parent: int = 0


def name_nonfinite(
    micro_batches: Sequence[MicroBatch],
    *,
    engine: Engine,
    world: World,
    num_label_tokens: int,
    num_paired: int = 0,
    seed: Callable[[], object],
    place: Callable[[MicroBatch], MicroBatch] = lambda batch: batch,
) -> str:
    """Run a step's micro-batches again and say what first was not finite; every rank calls it.

    Weights and inputs are looked at first, then every module's forward pass, then, if all that is
    finite on every rank and the engine can drop a gradient, the backward pass.

    Args:
        micro_batches: this rank's share of the step; as many on every rank.
        engine: the spread module, after `update` has skipped the step.
        world: this rank's place.
        num_label_tokens: of the whole global batch, as the step had it.
        num_paired: of the whole global batch, as the step had it.
        seed: seeds this rank's random stream as the step did, so that dropout repeats.
        place: puts a micro-batch where the model is.
    """
    watch = _Watch(engine.model)
    per_pair = labels_per_pair(num_label_tokens, num_paired=num_paired)
    with _undisturbed(world), _uncompiled():
        watch.look_at_tensors()
        seed()
        with torch.no_grad(), watch.forward_hooks():
            for number, batch in enumerate(micro_batches, start=1):
                watch.begin(number)
                placed = place(batch)
                watch.look_at_pixels(placed.pixel_values_PD)
                watch.look_at_loss(forward(engine, batch=placed, labels_per_pair=per_pair)[0])
        shares = _gather(watch.found, world=world)
        if engine.can_drop_gradient and not shares[:, 0].any():
            seed()
            with watch.backward_hooks():
                for number, batch in enumerate(micro_batches, start=1):
                    watch.begin(number)
                    with engine.micro_batch(is_last=number == len(micro_batches)):
                        loss, *_ = forward(engine, batch=place(batch), labels_per_pair=per_pair)
                        watch.in_backward = True
                        engine.backward(loss, weight=1.0 / max(1, num_label_tokens))
            engine.drop_gradient()
            shares = _gather(watch.found, world=world)
    if watch.found.kind:
        _LOG.warning("not finite on rank %d: %s", world.rank, watch.describe(watch.found))
    return _conclude(shares, watch=watch, saw_backward=engine.can_drop_gradient)


class _Watch:
    """Hooks on every module, and the first thing that they saw."""

    def __init__(self, model: nn.Module) -> None:
        self.found = _Found()
        self.in_backward = False
        self._micro_batch = 0
        self._modules = list(model.named_modules())
        self._tensors = [*model.named_parameters(), *model.named_buffers()]
        self._numbers = {module: number for number, (_, module) in enumerate(self._modules)}
        self._weights = {id(each): number for number, (_, each) in enumerate(self._tensors)}
        self._running: list[int] = []

    def begin(self, micro_batch: int) -> None:
        """Take note of which micro-batch comes."""
        self._micro_batch, self._running, self.in_backward = micro_batch, [], False

    def look_at_tensors(self) -> None:
        """Look for weights that are not finite, in this rank's share of them."""
        for number, (_, tensor) in enumerate(self._tensors):
            self._note(_PARAMETER, tensor=_local(tensor), module=number)

    def look_at_pixels(self, pixel_values_PD: torch.Tensor) -> None:
        """Look at a micro-batch's images."""
        self._note(_PIXELS, tensor=pixel_values_PD)

    def look_at_loss(self, loss: torch.Tensor) -> None:
        """Look at what came out in the end."""
        self._note(_LOSS, tensor=loss)

    @contextmanager
    def forward_hooks(self) -> Iterator[None]:
        """Look at every module's inputs and outputs."""
        with ExitStack() as stack:
            for _, module in self._modules:
                for handle in (
                    module.register_forward_pre_hook(self._enter, with_kwargs=True),
                    module.register_forward_hook(self._leave),
                ):
                    stack.callback(handle.remove)
            yield

    @contextmanager
    def backward_hooks(self) -> Iterator[None]:
        """Look at the gradients of every module's inputs, outputs and weights."""
        with ExitStack() as stack:
            for _, module in self._modules:
                for handle in (
                    module.register_forward_pre_hook(
                        partial(self._watch_inputs, stack), with_kwargs=True
                    ),
                    module.register_forward_hook(self._watch_outputs),
                ):
                    stack.callback(handle.remove)
            yield

    def describe(self, found: _Found) -> str:
        """Say in words what was found."""
        kind = _KINDS[found.kind]
        if found.place == _PARAMETER:
            return f"the weight '{self._tensors[found.module][0]}' holds {kind}"
        where = f"in micro-batch {found.micro_batch} "
        if found.place == _PIXELS:
            return f"{where}the pixel values hold {kind}"
        if found.place == _LOSS:
            return f"{where}the loss is {kind}, and what every module returned is finite"
        if found.place == _WEIGHT:
            return f"{where}the gradient of '{self._tensors[found.module][0]}' is {kind}"
        name = self._name(found.module)
        return (
            where
            + {
                _OUTPUT: f"{name} made {kind} of finite inputs in its forward pass",
                _BETWEEN: f"{self._name(found.parent)} made {kind} in its forward pass, before it "
                f"called {name}",
                _REACHING: f"the backward pass of what is computed from the output of {name} made "
                f"{kind}",
                _BACKWARD: f"{name} made {kind} of finite gradients in its backward pass",
            }[found.place]
        )

    def _name(self, number: int) -> str:
        name, module = self._modules[number]
        return f"{type(module).__name__} '{name}'" if name else type(module).__name__

    def _note(self, place: int, *, tensor: torch.Tensor, module: int = 0, parent: int = 0) -> None:
        if self.found.kind or not (tensor.is_floating_point() and tensor.numel()):
            return
        tensor = tensor.detach()
        if not torch.isfinite(tensor).all():
            kind = 1 if torch.isnan(tensor).any() else 2
            self.found = _Found(kind, place, self._micro_batch, module, parent)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        number = self._numbers[module]
        parent = self._running[-1] if self._running else 0
        for tensor in _tensors_of([args, _without_masks(kwargs)]):
            self._note(_BETWEEN, tensor=tensor, module=number, parent=parent)
        self._running.append(number)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        number = self._running.pop()
        for tensor in _tensors_of(output):
            self._note(_OUTPUT, tensor=tensor, module=number)

    def _watch_inputs(
        self, stack: ExitStack, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        if self.in_backward:
            return None  # It is being recomputed.
        number = self._numbers[module]
        for _, weight in module.named_parameters(recurse=False):
            known = self._weights.get(id(weight))
            if weight.requires_grad and known is not None and not isinstance(weight, DTensor):
                handle = weight.register_hook(partial(self._on_gradient, _WEIGHT, known))
                stack.callback(handle.remove)
        # The gradient of an input that others read, too, is a sum: an alias has this module's part.
        watched = partial(self._watch_alias, number)
        return tuple(map(watched, args)), {name: watched(each) for name, each in kwargs.items()}

    def _watch_alias(self, number: int, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.requires_grad):
            return value
        alias = value.view_as(value)
        alias.register_hook(partial(self._on_gradient, _BACKWARD, number))
        return alias

    def _watch_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.in_backward:
            return
        for tensor in _tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._on_gradient, _REACHING, self._numbers[module]))

    def _on_gradient(self, place: int, module: int, gradient: torch.Tensor) -> None:
        self._note(place, tensor=gradient, module=module)


def _conclude(shares: np.ndarray, *, watch: _Watch, saw_backward: bool) -> str:
    """Say what the first rank found that found anything, in the earliest micro-batch."""
    hits = np.flatnonzero(shares[:, 0])
    if not len(hits):
        looked = "" if saw_backward else "; this engine's backward pass is not looked at"
        return (
            "run again, no module made it: it came of adding up micro-batches or ranks, or does "
            f"not repeat{looked}"
        )
    first = min(hits, key=lambda rank: (shares[rank, 2], rank))
    others = f" ({len(hits)} of {len(shares)} ranks found something)" if len(shares) > 1 else ""
    found = _Found(*(int(number) for number in shares[first]))
    return f"rank {first}: {watch.describe(found)}{others}"


def _gather(found: _Found, *, world: World) -> np.ndarray:
    return gather_numbers(astuple(found), world=world)


@contextmanager
def _undisturbed(world: World) -> Iterator[None]:
    """Give the random streams back as they were."""
    devices = [world.device] if world.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


def _uncompiled() -> Any:
    """Run compiled blocks as they were: hooks on modules within a graph are not called."""
    if compiled.num_recompiles() is None:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's share; ZeRO 3 keeps it beside the parameter."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return getattr(tensor, "ds_tensor", tensor)


def _without_masks(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out masks, which may be minus infinity by design."""
    return {name: value for name, value in kwargs.items() if "mask" not in name}


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors of what a module takes or returns."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_of(each)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _tensors_of(list(vars(value).values()))
