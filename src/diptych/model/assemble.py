"""Build the model that trains: model_spec and the processor's numbers in, transformers model out.

It stays transformers' own class with its own parameter names, so that it is saved and loaded as any
other. Where it runs, and how it is spread, is unknown here.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from diptych.core.errors import ConfigError
from diptych.core.records import AnyImageSettings, ModelSpec, TokenIds
from diptych.model import adapters, weights
from diptych.model.families import TorchSide, torch_side
from diptych.model.streaming import outline
from diptych.shape.families import family

ATTENTION = {"": "sdpa", "text_config": "sdpa", "vision_config": "sdpa"}


def build(
    spec: ModelSpec,
    *,
    tokens: TokenIds,
    image: AnyImageSettings,
    seed: int | None,
    device: str = "cpu",
) -> PreTrainedModel:
    """Build the model in fp32; equal seeds give equal weights on every rank and device.

    Args:
        spec: family, and sizes or weights.
        tokens: the processor's token ids.
        image: the processor's image settings.
        seed: draws the first weights; None leaves them undefined, for whoever loads them next.
        device: where the model goes; 'meta' allocates nothing.

    Raises:
        ConfigError: the spec cannot work, or contradicts the processor.
    """
    known, side = family(spec.family), torch_side(spec.family)
    if spec.has_files:
        config = weights.read_config(spec, num_tokens=tokens.num_embeddings, tokens=tokens)
    else:
        config = side.config_of(
            spec.sizes, tie_word_embeddings=spec.tie_word_embeddings, tokens=tokens
        )
    sizes = side.sizes_of(config)
    known.check(sizes, image=image, tokens=tokens)
    _check_tokens(config, side=side, tokens=tokens)
    if spec.has_files and device == "meta":
        model = outline(config, attention=ATTENTION)
    elif spec.has_files:
        model = weights.load(spec, config=config, attention=ATTENTION, seed=seed)
    else:
        model = _draw(config, seed=seed, on_meta=device == "meta")
    unused = known.unused(sizes)
    if spec.lora is not None:
        adapters.inject(model, lora=spec.lora, unused=unused, seed=seed)
    _leave_out(model, patterns=unused)
    model.generation_config.eos_token_id = tokens.eos  # pyright: ignore[reportOptionalMemberAccess]
    model.generation_config.pad_token_id = tokens.pad  # pyright: ignore[reportOptionalMemberAccess]
    return model if device == "meta" else model.to(device)  # pyright: ignore[reportArgumentType]


def _draw(config: PreTrainedConfig, *, seed: int | None, on_meta: bool) -> PreTrainedModel:
    """Make the modules and draw their weights on the CPU, without touching the global generator."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if on_meta:
            stack.enter_context(torch.device("meta"))
        elif seed is None:
            stack.enter_context(no_init_weights())
        else:
            torch.manual_seed(seed)
        return AutoModelForImageTextToText.from_config(
            config, dtype=torch.float32, attn_implementation=ATTENTION
        )


def _leave_out(model: nn.Module, *, patterns: Sequence[str]) -> None:
    """Ask for no gradient of what no loss depends on: an engine would wait for it."""
    for name, parameter in model.named_parameters():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)


def _check_tokens(config: PreTrainedConfig, *, side: TorchSide, tokens: TokenIds) -> None:
    for name, ours, theirs in side.token_pairs(config, tokens=tokens):
        if ours != theirs:
            raise ConfigError(
                f"The weights' {name} is {ours}, the processor's is {theirs}",
                cure="Use the processor that belongs to the weights",
            )
