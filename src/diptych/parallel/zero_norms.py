"""The gradient's norm under DeepSpeed, by tower: its optimizer in, what its last step found out.

DeepSpeed takes the norm of each piece of a gradient and adds up the pieces of a group of parameters
over ranks, in an exchange for each group. Here they are added up by tower, in one exchange for all,
and DeepSpeed goes on with the towers' norms in the place of the groups', so they cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from diptych.core.records import TowerName
from diptych.model.parameters import list_parameters
from diptych.parallel.mesh import World

_Pieces = Iterator[tuple[nn.Parameter, torch.Tensor]]


class TowerNorms:
    """Takes the norms of a step for DeepSpeed, and remembers them.

    Args:
        model: as DeepSpeed has it; each of its parameters is in one tower.
        optimizer: DeepSpeed's, of stage 1, 2 or 3.
        world: this rank's place.
    """

    def __init__(self, model: nn.Module, *, optimizer: Any, world: World) -> None:
        self._optimizer = optimizer
        self._device = world.device
        self._tower_of: dict[nn.Parameter, TowerName] = {
            parameter: each.tower
            for parameter, each in zip(model.parameters(), list_parameters(model), strict=True)
            if parameter.requires_grad
        }
        self._towers = list(dict.fromkeys(self._tower_of.values()))
        self._found_T: torch.Tensor | None = None
        self._is_offloaded = False
        if hasattr(optimizer, "fp16_groups"):
            self._is_offloaded = optimizer.offload_optimizer
            optimizer._get_norm_groups = self._of_shards
        elif hasattr(optimizer, "params_in_partition"):
            self._is_offloaded = optimizer.cpu_offload
            optimizer.scaled_global_norm = self._of_partitions
        else:
            self._gradients = optimizer.get_grads_for_norm
            optimizer.get_grads_for_norm = self._of_whole_gradients

    def forget(self) -> None:
        """Forget the norms of a step that was not applied."""
        self._found_T = None

    def take(self, grad_norm: torch.Tensor, *, scale: float) -> tuple[float, dict[str, float]]:
        """Read the norms of a step that was applied, in one copy to the host, and forget them.

        Args:
            grad_norm: [], the whole gradient's, without the loss scale.
            scale: the loss scale of the step.

        Returns:
            The whole gradient's norm, and that of each tower, without the scale.
        """
        found_T, self._found_T = self._found_T, None
        if found_T is None:
            return float(grad_norm), {}
        norms_T = torch.cat([grad_norm.reshape(1).to(found_T), found_T / scale])
        whole, *by_tower = norms_T.tolist()
        return whole, dict(zip(self._towers, by_tower, strict=True))

    def _of_shards(self) -> list[torch.Tensor]:
        """Return the towers' norms in the place of the groups': stage 3."""
        return list(self._add_up(self._pieces(self._optimizer.fp16_groups), is_whole=False))

    def _of_partitions(self) -> torch.Tensor:
        """Return the norm of the towers' norms: stages 1 and 2.

        Where one is not finite this is not either, and DeepSpeed skips the step.
        """
        pieces = self._pieces(self._optimizer.params_in_partition)
        return torch.linalg.vector_norm(self._add_up(pieces, is_whole=False))

    def _of_whole_gradients(self, for_clipping: bool = False) -> Any:
        """Return the towers' norms as a gradient of the same norm: stage 1 with weights in bf16."""
        if for_clipping:
            return self._gradients(for_clipping=True)
        optimizer = self._optimizer
        pieces = (
            (parameter, _norm(optimizer.fp32_groups_gradients[number][place]))
            for number, group in enumerate(optimizer.bf16_groups)
            for place, parameter in enumerate(group)
            if optimizer.fp32_groups_has_gradients[number][place]
        )
        return [self._add_up(pieces, is_whole=True)], {}

    def _pieces(self, groups: list[list[nn.Parameter]]) -> _Pieces:
        """Yield the norm of what this rank has of each parameter's gradient."""
        optimizer = self._optimizer
        for number, group in enumerate(groups):
            if self._is_offloaded:
                # Taken as the gradients went to the host.
                found = optimizer.norm_for_param_grads
                named = ((each, optimizer.get_param_id(each)) for each in group)
                yield from ((each, found[name]) for each, name in named if name in found)
                continue
            gradients = optimizer.averaged_gradients[number]
            real = (each for each in gradients if not getattr(each, "_zero_padding", False))
            # What is left over is padding at the end.
            yield from (
                (each, _norm(gradient)) for each, gradient in zip(group, real, strict=False)
            )

    def _add_up(self, pieces: _Pieces, *, is_whole: bool) -> torch.Tensor:
        """Add pieces up by tower, and over ranks unless each of them has all.

        Returns:
            [number of towers] float64, on the device where DeepSpeed clips.
        """
        by_tower: dict[TowerName, list[torch.Tensor]] = {tower: [] for tower in self._towers}
        for parameter, norm in pieces:
            by_tower[self._tower_of[parameter]].append(norm)
        squares_T = torch.zeros(len(by_tower), dtype=torch.double, device=self._device)
        for place, norms in enumerate(by_tower.values()):
            if norms:
                squares_T[place] = torch.stack(norms).double().square().sum()
        if not is_whole:
            dist.all_reduce(squares_T, group=self._optimizer.dp_process_group)
        found_T = squares_T.sqrt()
        self._found_T = found_T.cpu() if self._is_offloaded else found_T
        return self._found_T


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(gradient, dtype=torch.double)
