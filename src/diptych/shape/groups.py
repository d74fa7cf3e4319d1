"""Which parameters are updated alike: parameters and an optimizer in, groups out.

The ranks make their optimizer of it, and the planner counts with it what DeepSpeed lays end to end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from diptych.core.errors import ConfigError
from diptych.core.records import OptimizerKind, OptimizerSpec, Parameter, TowerName, TowerRates

_DEFAULT = TowerRates()


@dataclass(frozen=True)
class Group:
    """Parameters that train with one rate and one decay.

    Attributes:
        parameters: in the model's order.
        lr_scale: times the step's learning rate is theirs.
        weight_decay: theirs.
        algorithm: what updates them; `muon` is for matrices of blocks.
    """

    parameters: tuple[Parameter, ...]
    lr_scale: float
    weight_decay: float
    algorithm: OptimizerKind


_Rate = tuple[float | None, float, int]
"""A tower's own rate, its layer decay, and the power that this is raised to."""
_Key = tuple[_Rate, float | None, Literal["decays", "stays"], OptimizerKind]


def group_parameters(parameters: Sequence[Parameter], *, spec: OptimizerSpec) -> tuple[Group, ...]:
    """Group what trains by rate and decay: those that decay first, then in the model's order.

    Matrices decay; vectors (biases, norms) and embeddings do not. How many groups there are depends
    on the towers' settings alone, not on whether two numbers are equal.

    Args:
        parameters: all of the model, in its order, frozen ones too: a block's place counts them.
        spec: the optimizer.

    Raises:
        ConfigError: a tower has rates of its own, and nothing of it trains.
    """
    _check_towers(parameters, spec=spec)
    powers = _powers(parameters)
    groups: dict[_Key, list[Parameter]] = defaultdict(list)
    for each in parameters:
        if each.trains:
            groups[_key(each, power=powers[each.name], spec=spec)].append(each)
    # Python's sort keeps the order of equals.
    ordered = sorted(groups.items(), key=lambda item: item[0][2] == "stays")
    return tuple(_group(key, parameters=tuple(listed), spec=spec) for key, listed in ordered)


def _key(parameter: Parameter, *, power: int, spec: OptimizerSpec) -> _Key:
    rates = spec.towers.get(parameter.tower, _DEFAULT)
    decays = len(parameter.shape) >= 2 and not parameter.embeds
    falls = power > 0 and rates.layer_decay < 1
    rate = (rates.lr, rates.layer_decay, power) if falls else (rates.lr, 1.0, 0)
    is_matrix = decays and len(parameter.shape) == 2 and parameter.block != ""
    algorithm = "adamw" if spec.kind == "muon" and not is_matrix else spec.kind
    if decays:
        return rate, rates.weight_decay, "decays", algorithm
    return rate, None, "stays", algorithm


def _group(key: _Key, *, parameters: tuple[Parameter, ...], spec: OptimizerSpec) -> Group:
    (lr, layer_decay, power), own_decay, kind, algorithm = key
    weight_decay = spec.weight_decay if own_decay is None else own_decay
    return Group(
        parameters=parameters,
        lr_scale=(spec.lr if lr is None else lr) / spec.lr * layer_decay**power,
        weight_decay=weight_decay if kind == "decays" else 0.0,
        algorithm=algorithm,
    )


def _powers(parameters: Sequence[Parameter]) -> dict[str, int]:
    """Count the blocks between each parameter and its tower's last; what follows that has none."""
    blocks: dict[TowerName, dict[str, int]] = defaultdict(dict)
    for each in parameters:
        if each.block:
            blocks[each.tower].setdefault(each.block, len(blocks[each.tower]))
    powers: dict[str, int] = {}
    begun: set[TowerName] = set()
    for each in parameters:
        num_blocks = len(blocks[each.tower])
        if each.block:
            begun.add(each.tower)
            powers[each.name] = num_blocks - 1 - blocks[each.tower][each.block]
        else:
            powers[each.name] = 0 if each.tower in begun else num_blocks
    return powers


def _check_towers(parameters: Sequence[Parameter], *, spec: OptimizerSpec) -> None:
    trained = {each.tower for each in parameters if each.trains}
    for tower in spec.towers:
        if tower not in trained:
            raise ConfigError(
                f"train.optimizer.towers has {tower}, of which nothing trains: it is frozen, or "
                "has no weights (with tied word embeddings the head's are the language model's)",
                allowed=f"Trained: {', '.join(sorted(trained))}",
                cure=f"Take {tower} out of train.optimizer.towers, or out of plan.model.freeze",
            )
