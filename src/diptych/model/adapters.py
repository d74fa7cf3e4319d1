"""Adapters by peft: a model and `plan.model.lora` in, that model with adapters in it out.

The model stays transformers' class; an adapted layer becomes peft's, which holds the layer and its
adapter. Weights are drawn by the adapter's name, so they are equal on every rank and layout. How
the model is spread is unknown here.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from diptych.core.errors import ConfigError
from diptych.core.records import LoraSpec
from diptych.model.families import family_name
from diptych.model.freeze import nearest_names
from diptych.shape.adapters import ADAPTER, MAGNITUDE, is_adapter
from diptych.shape.anatomy import Tower
from diptych.shape.families import family

if TYPE_CHECKING:
    from peft import LoraConfig

_SETTING = "plan.model.lora"


def inject(model: nn.Module, *, lora: LoraSpec, unused: Sequence[str], seed: int | None) -> None:
    """Put an adapter beside each layer that is meant, and freeze the towers that have any.

    Args:
        model: transformers' own, whole; on the meta device nothing is allocated.
        lora: which layers, and the adapters' sizes.
        unused: patterns over parameters that no loss depends on; their layers get none.
        seed: draws the adapters; None leaves them undefined, as the meta device does.

    Raises:
        ConfigError: peft is not installed, or a tower or a pattern means no linear layer.
    """
    layers = adapted_layers(model, lora=lora, unused=unused)
    _need_peft()
    from peft import inject_adapter_in_model

    is_meta = next(model.parameters()).is_meta
    asks = {id(parameter): parameter.requires_grad for parameter in model.parameters()}
    # Peft draws weights of its own from the global generator.
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(
            peft_config(lora, layers=layers),
            model,
            adapter_name=ADAPTER,
            low_cpu_mem_usage=is_meta,
        )
    anatomy = family(family_name(model)).anatomy
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.requires_grad_(True)
        else:
            stays = anatomy.tower(name) in lora.towers
            parameter.requires_grad_(asks[id(parameter)] and not stays)
    if seed is not None and not is_meta:
        _fill(model, seed=seed)


def adapted_layers(
    model: nn.Module, *, lora: LoraSpec, unused: Sequence[str] = ()
) -> tuple[str, ...]:
    """Name the layers that get an adapter, in the model's order.

    Args:
        model: without adapters.
        lora: which layers.
        unused: patterns over parameters that no loss depends on; their layers get none.

    Raises:
        ConfigError: a tower or a pattern means no linear layer.
    """
    there = _linear_layers(model, lora=lora, unused=unused)
    for pattern in lora.targets:
        if not any(_matches(name, patterns=[pattern]) for name in there):
            raise _no_match(pattern, model=model, lora=lora, layers=[*there])
    if lora.targets:
        chosen = {name for name in there if _matches(name, patterns=lora.targets)}
    else:
        anatomy = family(family_name(model)).anatomy
        chosen = {name for name in there if anatomy.block(f"{name}.weight")}
    for tower in lora.towers:
        of_tower = [name for name in there if there[name] == tower]
        if chosen.isdisjoint(of_tower):
            raise _left_out(tower, layers=of_tower)
    return tuple(name for name in there if name in chosen)


def peft_config(lora: LoraSpec, *, layers: Sequence[str]) -> LoraConfig:
    """Say the same in peft's words, with layers by their full names."""
    from peft import LoraConfig

    alpha = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha
    return LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=lora.dropout,
        use_dora=lora.dora,
        target_modules=list(layers),
        bias="none",
    )


def draw(name: str, *, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Draw an adapter's matrix: A uniform in +-1/sqrt(columns), B zero, so that nothing changes.

    Args:
        name: the parameter's full name.
        shape: its own, whole.
        seed: where all draws begin; the global generator stays as it was.

    Returns:
        [*shape] float32, on the CPU.

    Source: `reset_lora_parameters` of peft, which draws in the order of layers.
    """
    if ".lora_A." not in name:
        return torch.zeros(*shape)
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(*shape).uniform_(-bound, bound, generator=generator)


def magnitudes(weight_OI: torch.Tensor) -> torch.Tensor:
    """Return DoRA's first magnitudes: the length of each row of a weight, [O]."""
    return torch.linalg.norm(weight_OI, dim=1)


@torch.no_grad()
def _fill(model: nn.Module, *, seed: int) -> None:
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if name.endswith(MAGNITUDE):
            base = parameters[f"{name.removesuffix(MAGNITUDE)}.base_layer.weight"]
            parameter.copy_(magnitudes(base))
        elif is_adapter(name):
            parameter.copy_(draw(name, shape=parameter.shape, seed=seed))


def _linear_layers(model: nn.Module, *, lora: LoraSpec, unused: Sequence[str]) -> dict[str, Tower]:
    """Map the linear layers of the towers that are meant to those; in the model's order."""
    anatomy = family(family_name(model)).anatomy
    layers = {
        name: anatomy.tower(f"{name}.weight")
        for name, module in model.named_modules()
        # A class made of nn.Linear may be read past its forward.
        if type(module) is nn.Linear and not _matches(f"{name}.weight", patterns=unused)
    }
    return {name: tower for name, tower in layers.items() if tower in lora.towers}


def _matches(name: str, *, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _need_peft() -> None:
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            f"{_SETTING} needs peft, which is not installed",
            cure=f"Run: pip install 'diptych[lora]'; or set {_SETTING} to null",
        )


def _left_out(tower: Tower, *, layers: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{_SETTING}.towers names {tower}, and no linear layer of it gets an adapter",
        allowed="Without targets those of a tower's blocks, with targets those that match; "
        f"{tower} has {', '.join(layers[:3]) or 'no linear layer'}",
        cure=f"Name its layers in {_SETTING}.targets, or take {tower} out of towers",
    )


def _no_match(
    pattern: str, *, model: nn.Module, lora: LoraSpec, layers: Sequence[str]
) -> ConfigError:
    anatomy = family(family_name(model)).anatomy
    modules = {
        name: module
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }
    found = next((name for name in modules if _matches(name, patterns=[pattern])), None)
    if found is None:
        cure = f"The nearest names are: {', '.join(nearest_names(pattern, names=layers))}"
    elif isinstance(modules[found], nn.Embedding) or found.startswith("lm_head"):
        cure = "Take it out: a head trains whole unless plan.model.freeze names it"
    elif type(modules[found]) is nn.Linear:
        cure = f"Name the tower {anatomy.tower(f'{found}.weight')} in {_SETTING}.towers"
    else:
        cure = "Take it out: adapters stand beside linear layers alone"
    matched = f"; it matches '{found}'" if found else ""
    return ConfigError(
        f"{_SETTING}.targets has '{pattern}', which is no linear layer of "
        f"{', '.join(lora.towers)} that a loss depends on{matched}",
        allowed="Patterns over full names of linear layers; head and embedding get no adapter",
        cure=cure,
    )
