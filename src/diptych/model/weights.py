"""Weights made elsewhere: a local folder or a hub id flows in; a config or a model flows out.

Nothing in such a folder is executed: no remote code, and safetensors only.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from diptych.core.errors import ConfigError
from diptych.core.records import ModelSpec, TokenIds
from diptych.model import composition, config_file
from diptych.model.revision import Source, find_config, tower_sources
from diptych.model.streaming import Reading, initialise, materialise, outline


def read_config(
    spec: ModelSpec, *, num_tokens: int | None = None, tokens: TokenIds | None = None
) -> PreTrainedConfig:
    """Read the config that lies beside the weights, or make one of those of towers.

    Args:
        spec: names the folder or hub id.
        num_tokens: of the processor; the vocabulary has so many where embeddings are resized.
        tokens: the processor's, which a config that is made has the ids of.

    Raises:
        ConfigError: sizes are given too, there is no config that can be used, it is of another
            family, or its vocabulary is too small for the tokens.
    """
    if spec.towers is not None:
        return _compose_config(spec, num_tokens=num_tokens, tokens=tokens)
    assert spec.weights is not None, "a spec without weights has no config to read"
    if spec.sizes:
        raise ConfigError(
            f"plan.model names both sizes and the weights '{spec.weights}'",
            allowed="One of the two: weights bring their own sizes",
            cure="Set plan.model.sizes: null, or plan.model.weights: null",
        )
    config = config_file.read(find_config(spec))
    if config.model_type != spec.family:
        raise ConfigError(
            f"The weights '{spec.weights}' are of the family '{config.model_type}'",
            cure=f"Set plan.model.family to it, or choose weights of '{spec.family}'",
        )
    if num_tokens is not None:
        _fit_vocabulary(config, spec=spec, num_tokens=num_tokens)
    return config


def _compose_config(
    spec: ModelSpec, *, num_tokens: int | None, tokens: TokenIds | None
) -> PreTrainedConfig:
    config = composition.read_config(spec, tokens=tokens)
    language = tower_sources(spec).get("language")
    if num_tokens is not None and language is not None:
        _fit_vocabulary(config, spec=language, num_tokens=num_tokens)
    return config


def load(
    spec: ModelSpec,
    *,
    config: PreTrainedConfig,
    attention: dict[str, str],
    seed: int | None,
) -> PreTrainedModel:
    """Load the whole model in fp32 onto the CPU.

    Args:
        spec: names the folder or hub id.
        config: as `read_config` returned it.
        attention: attention implementation by sub-config.
        seed: draws the weights that may be missing; None reads no weights and leaves them
            undefined, for whoever loads them next.

    Raises:
        ConfigError: there are no safetensors, they are damaged, or they do not fit the model.
    """
    model, device = outline(config, attention=attention), torch.device("cpu")
    if seed is None:
        initialise(model, missing=(), seed=0, device=device)
        materialise(model, device=device)
    else:
        Reading(model, spec=spec, seed=seed, device=device).fill(model, device=device)
    return model.eval()


def _fit_vocabulary(config: PreTrainedConfig, *, spec: Source, num_tokens: int) -> None:
    text = config.get_text_config()
    if num_tokens <= text.vocab_size:
        return
    if not spec.resize_embeddings:
        raise ConfigError(
            f"The tokenizer has {num_tokens} tokens, the vocabulary of the weights "
            f"'{spec.weights}' {text.vocab_size}",
            allowed="A row of the embedding for every token",
            cure="Set plan.model.resize_embeddings: true, or use the processor of the weights",
        )
    text.vocab_size = num_tokens
