"""What a checkpoint holds of a model that DeepSpeed has taken apart: tensors by name, whole or cut.

In: DeepSpeed's optimizer, whose fp32 weights and moments lie in flat partitions. Out: this rank's
rows of every tensor, cut as FSDP2 cuts them, so that any layout reads them. One parameter is whole
at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from diptych.core.records import Layout
from diptych.parallel.mesh import World
from diptych.parallel.moments import first_state, moments_of
from diptych.parallel.storage import MODEL_PREFIX, OPTIMIZER_PREFIX


class FrozenWeights:
    """Rows in fp32 of weights that do not train; DeepSpeed holds them in low precision only."""

    def __init__(self, model: nn.Module, *, layout: Layout, world: World) -> None:
        self.rows: dict[str, torch.Tensor] = {}
        if layout.precision != "fp32":
            for name, parameter in model.named_parameters():
                if not parameter.requires_grad:
                    rows = _cut(parameter.detach(), rank=world.rank, size=world.size)
                    self.rows[name] = rows.to("cpu", copy=True)


class ZeroTensors:
    """Reads and writes the tensors of a checkpoint; every rank calls it, in the same order."""

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Any,
        layout: Layout,
        world: World,
        frozen: FrozenWeights,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._is_sharded = layout.zero.stage == 3
        self._world = world
        self._frozen = frozen
        # Shards stay in the host's memory, so the mesh needs no communicator of its own. It has a
        # name of its own, or torch's caches would hand it to tensors of a mesh that has one.
        self._mesh = DeviceMesh(
            "cpu", list(range(world.size)), mesh_dim_names=("rows",), _init_backend=False
        )
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        # All groups are AdamW's.
        self._moments = moments_of(optimizer.optimizer.param_groups[0])
        self._make_moments()

    def read(self) -> dict[str, torch.Tensor]:
        """Copy this rank's rows of weights and moments, in fp32, to the host."""
        found: dict[str, torch.Tensor] = {}
        for parameter, states in self._trained():
            name = self._names[parameter]
            found[MODEL_PREFIX + name] = self._shard(states.read(parameter, moment=None))
            for moment in self._moments:
                whole = states.read(parameter, moment=moment)
                found[f"{OPTIMIZER_PREFIX}{name}.{moment}"] = self._shard(whole)
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad:
                found[MODEL_PREFIX + name] = self._read_frozen(name, parameter=parameter)
        return found

    def write(self, tensors: Mapping[str, torch.Tensor], *, num_updates: int) -> None:
        """Put a checkpoint's tensors where DeepSpeed keeps them, and the low-precision copies."""
        for parameter, states in self._trained():
            name = self._names[parameter]
            states.write(parameter, whole=self._whole(tensors[MODEL_PREFIX + name]), moment=None)
            for moment in self._moments:
                whole = self._whole(tensors[f"{OPTIMIZER_PREFIX}{name}.{moment}"])
                states.write(parameter, whole=whole, moment=moment)
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad:
                self._write_frozen(name, parameter=parameter, tensor=tensors[MODEL_PREFIX + name])
        self._refresh_copies()
        self._set_steps(num_updates)

    def _trained(self) -> Iterator[tuple[nn.Parameter, _Flat | _Sharded]]:
        """Yield the trained parameters, with a way to their states that holds until the next."""
        if not self._is_sharded:
            flat = _Flat()
            yield from ((each, flat) for each in self._names if each.requires_grad)
            return
        for number, group in enumerate(self._optimizer.fp16_groups):
            with swapped_in(self._optimizer, number=number):
                sharded = _Sharded(self._optimizer, number=number, rank=self._world.rank)
                yield from ((each, sharded) for each in group)

    def _read_frozen(self, name: str, *, parameter: nn.Parameter) -> torch.Tensor:
        if name in self._frozen.rows:
            shape = getattr(parameter, "ds_shape", parameter.shape)
            return self._wrap(self._frozen.rows[name].clone(), shape=shape)
        with _gathered(parameter):
            return self._shard(parameter.detach())

    def _write_frozen(self, name: str, *, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        if name in self._frozen.rows:
            rows = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._frozen.rows[name].copy_(rows)
        whole = self._whole(tensor)
        with _gathered(parameter, modifier_rank=0), torch.no_grad():
            parameter.copy_(whole)

    def _shard(self, whole: torch.Tensor) -> torch.Tensor:
        rows = _cut(whole, rank=self._world.rank, size=self._world.size)
        # A copy, or the whole tensor would stay in memory behind its rows.
        return self._wrap(rows.to("cpu", torch.float32, copy=True), shape=whole.shape)

    def _wrap(self, rows: torch.Tensor, *, shape: Sequence[int]) -> torch.Tensor:
        if not shape:
            return rows
        stride = torch.empty(tuple(shape), device="meta").stride()
        return DTensor.from_local(
            rows,
            self._mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Collect a tensor's rows from all ranks, on this rank's device."""
        if not isinstance(tensor, DTensor):
            return tensor.to(self._world.device)
        rows = tensor.to_local().to(self._world.device)
        if self._world.size == 1:
            return rows
        shape = (-(-tensor.shape[0] // self._world.size), *tensor.shape[1:])
        mine = rows.new_zeros(shape)
        mine[: rows.shape[0]] = rows
        everyone = rows.new_empty((self._world.size * shape[0], *shape[1:]))
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        gather(everyone, mine)
        return everyone[: tensor.shape[0]]

    def _make_moments(self) -> None:
        """Make the states that AdamW makes in its first step, so that they can be read before."""
        basic = self._optimizer.optimizer
        fused = bool(basic.defaults.get("fused"))
        for number, _ in enumerate(flat_weights(self._optimizer)):
            with swapped_in(self._optimizer, number=number):
                weights = flat_weights(self._optimizer)[number]
                state = basic.state[weights]
                # DeepSpeed's own Adam counts with an integer.
                if "foreach" in basic.defaults:
                    device = weights.device if fused else torch.device("cpu")
                    state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                else:
                    state["step"] = 0
                for moment in self._moments:
                    state[moment] = first_state(moment, weights=weights)
        if not self._is_sharded:
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _set_steps(self, num_updates: int) -> None:
        for state in self._optimizer.optimizer.state.values():
            if isinstance(state["step"], torch.Tensor):
                state["step"].fill_(float(num_updates))
            else:
                state["step"] = num_updates

    def _refresh_copies(self) -> None:
        """Round the fp32 weights to what forward passes read."""
        optimizer = self._optimizer
        if not self._is_sharded:
            optimizer.update_lp_params()
            return
        optimizer._partition_all_parameters()
        for number, _ in enumerate(optimizer.fp16_groups):
            with swapped_in(optimizer, number=number):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


class _Flat:
    """States of stages 1 and 2: a rank's partition may begin and end within a parameter."""

    def read(self, parameter: nn.Parameter, *, moment: str | None) -> torch.Tensor:
        """Sum the ranks' fragments to the whole state."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        whole = (
            safe_get_full_fp32_param(parameter)
            if moment is None
            else safe_get_full_optimizer_state(parameter, moment)
        )
        assert whole is not None, "DeepSpeed keeps a state of every parameter that trains"
        return whole

    def write(self, parameter: nn.Parameter, *, whole: torch.Tensor, moment: str | None) -> None:
        """Copy this rank's fragment, if it has one."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if moment is None:
            safe_set_full_fp32_param(parameter, whole)
        else:
            safe_set_full_optimizer_state(parameter, whole, moment)


class _Sharded:
    """States of stage 3: every rank has an equal part of each parameter, padded at the end."""

    def __init__(self, optimizer: Any, *, number: int, rank: int) -> None:
        self._optimizer = optimizer
        self._weights = flat_weights(optimizer)[number]
        self._rank = rank

    def read(self, parameter: nn.Parameter, *, moment: str | None) -> torch.Tensor:
        """Gather the ranks' parts."""
        part = self._part(parameter, moment=moment).to(parameter.device)
        return self._optimizer._fp32_state_allgather(parameter, part)

    def write(self, parameter: nn.Parameter, *, whole: torch.Tensor, moment: str | None) -> None:
        """Copy this rank's part."""
        part = self._part(parameter, moment=moment)
        mine = whole.flatten()[self._rank * part.numel() :][: part.numel()]
        part[: mine.numel()].copy_(mine)
        part[mine.numel() :].zero_()

    def _part(self, parameter: nn.Parameter, *, moment: str | None) -> torch.Tensor:
        optimizer = self._optimizer
        _, start, count = optimizer.grad_position[optimizer.get_param_id(parameter)]
        flat = self._weights
        if moment is not None:
            flat = optimizer.optimizer.state[flat][moment]
        return flat.detach().narrow(0, start, count)


def flat_weights(optimizer: Any) -> list[torch.Tensor]:
    """List the flat fp32 partitions that the optimizer updates, whatever its class calls them."""
    for name in (
        "fp32_partitioned_groups_flat",
        "single_partition_of_fp32_groups",
        "fp32_groups_flat_partition",
    ):
        if hasattr(optimizer, name):
            return getattr(optimizer, name)
    raise AssertionError(f"{type(optimizer).__name__} is no optimizer of ZeRO")


@contextmanager
def swapped_in(optimizer: Any, *, number: int) -> Iterator[None]:
    """Have a group's states in memory, and written back where they lie on a disk."""
    is_swapped = getattr(optimizer, "swap_optimizer", False)
    is_swapped = is_swapped and optimizer._swappable_optimizer_subgroup(number)
    if is_swapped:
        optimizer._optimizer_states_and_gradient_swap_in(number)
    try:
        yield
    finally:
        if is_swapped:
            optimizer._optimizer_states_and_gradient_swap_out(number)


@contextmanager
def _gathered(parameter: nn.Parameter, *, modifier_rank: int | None = None) -> Iterator[None]:
    if not hasattr(parameter, "ds_id"):
        yield
        return
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    with GatheredParameters([parameter], modifier_rank=modifier_rank):
        yield


def _cut(whole: torch.Tensor, *, rank: int, size: int) -> torch.Tensor:
    """Return a rank's rows as `torch.chunk` deals them; a number is everyone's."""
    if whole.ndim == 0:
        return whole
    rows = -(-whole.shape[0] // size)
    return whole[rank * rows : (rank + 1) * rows]
