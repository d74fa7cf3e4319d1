"""A run's adapters in a release: merged into their layers' weights, or in a folder of their own.

In: a checkpoint's weights and the run. Out: the weights of a model without adapters, and what goes
beside them in peft's format. How releases are compared is unknown here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from diptych.core.files import write_text
from diptych.core.hashing import canonical_json
from diptych.core.records import ModelSpec, ProcessorInfo
from diptych.model.adapters import peft_config
from diptych.model.assemble import build
from diptych.shape.adapters import ADAPTER, is_adapter, plain_name

Weights = dict[str, torch.Tensor]
WEIGHTS = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
"""What peft puts before the model's names, for it wraps the model twice."""


@dataclass(frozen=True, kw_only=True)
class Released:
    """What a release has of a checkpoint.

    Attributes:
        model: the spec of its model, without adapters.
        weights: of that model, by its names.
        adapter: of the adapter beside it, by peft's names; empty where there is none.
    """

    model: ModelSpec
    weights: Weights
    adapter: Weights


def take_apart(
    weights: Mapping[str, torch.Tensor],
    *,
    spec: ModelSpec,
    info: ProcessorInfo,
    form: Literal["merged", "apart"],
) -> Released:
    """Split a checkpoint into what a release has of it; without adapters it is the whole.

    Args:
        weights: of the checkpoint, by full name; in fp32.
        spec: of the run.
        info: the processor's numbers.
        form: merged adds each adapter to its layer's weight, apart leaves both as they are.
    """
    plain = spec.model_copy(update={"lora": None})
    if spec.lora is None:
        return Released(model=plain, weights=dict(weights), adapter={})
    if form == "merged":
        weights = _merge(weights, spec=spec, info=info)
    return Released(
        model=plain,
        weights={plain_name(name): each for name, each in weights.items() if not is_adapter(name)},
        adapter={_peft_name(name): each for name, each in weights.items() if is_adapter(name)},
    )


def write_adapter(folder: Path, *, adapter: Weights, spec: ModelSpec) -> None:
    """Write an adapter as `PeftModel.from_pretrained(model, folder)` reads it."""
    from safetensors.torch import save_file

    assert spec.lora is not None, "a run without adapters has none to write"
    folder.mkdir()
    layers = sorted({_layer(name) for name in adapter})
    peft_config(spec.lora, layers=layers).save_pretrained(str(folder))
    path = folder / _CONFIG
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    # A set's order is another one in every process, and equal runs have equal releases.
    config["target_modules"] = layers
    config["inference_mode"] = True
    write_text(path, text=canonical_json(config) + "\n")
    save_file(
        {name: each.contiguous() for name, each in adapter.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )


@torch.no_grad()
def _merge(weights: Mapping[str, torch.Tensor], *, spec: ModelSpec, info: ProcessorInfo) -> Weights:
    """Add adapters to their layers' weights by peft's own arithmetic, without them afterwards."""
    from peft.tuners.lora import LoraLayer

    model = build(spec, tokens=info.tokens, image=info.image, seed=None, device="meta")
    model.load_state_dict(weights, strict=False, assign=True)
    merged = dict(weights)
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            layer: Any = module
            # In a copy: the checkpoint's own tensors stay.
            layer.merge(safe_merge=True)
            merged[f"{name}.base_layer.weight"] = layer.get_base_layer().weight.detach()
    return {name: each for name, each in merged.items() if not is_adapter(name)}


def _peft_name(name: str) -> str:
    """Name an adapter's tensor as peft's files do: without the adapter's own name."""
    short = name.replace(f".{ADAPTER}.", ".")
    return _PREFIX + (short.removesuffix(".weight") if "lora_magnitude_vector" in short else short)


def _layer(name: str) -> str:
    """Name the layer that a tensor of peft's files adapts."""
    return name.removeprefix(_PREFIX).partition(".lora_")[0]
