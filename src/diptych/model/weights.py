"""Weights made elsewhere: a local folder or a hub id flows in; a config or a model flows out.

Nothing in such a folder is executed: no remote code, and safetensors only.
"""

from __future__ import annotations

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from diptych.core.errors import ConfigError
from diptych.core.records import ModelSpec


def read_config(spec: ModelSpec) -> PreTrainedConfig:
    """Read the config that lies beside the weights.

    Raises:
        ConfigError: sizes are given too, there is no config, or it is of another family.
    """
    assert spec.weights is not None, "a spec without weights has no config to read"
    if spec.sizes:
        raise ConfigError(
            f"plan.model names both sizes and the weights '{spec.weights}'",
            allowed="One of the two: weights bring their own sizes",
            cure="Remove plan.model.sizes, or set plan.model.weights: null",
        )
    try:
        config = AutoConfig.from_pretrained(spec.weights, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"plan.model.weights is '{spec.weights}': {str(error).splitlines()[0]}",
            allowed="A folder that holds config.json and *.safetensors, or a hub id",
            cure="Correct the path (relative to the project's folder)",
        ) from error
    if config.model_type != spec.family:
        raise ConfigError(
            f"The weights '{spec.weights}' are of the family '{config.model_type}'",
            cure=f"Set plan.model.family to it, or choose weights of '{spec.family}'",
        )
    return config


def load(spec: ModelSpec, *, attention: dict[str, str]) -> PreTrainedModel:
    """Load the whole model in fp32 onto the CPU.

    Args:
        spec: names the folder or hub id.
        attention: attention implementation by sub-config.

    Raises:
        ConfigError: there are no safetensors, or they are damaged.
    """
    assert spec.weights is not None, "a spec without weights has none to load"
    try:
        return AutoModelForImageTextToText.from_pretrained(
            spec.weights,
            dtype=torch.float32,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation=attention,
        )
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"plan.model.weights '{spec.weights}' has no safetensors that can be read: "
            f"{str(error).splitlines()[0]}",
            cure="Save the weights as *.safetensors, beside their index if there are several",
        ) from error
