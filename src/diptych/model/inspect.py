"""List a model's parameters without allocating it: a model_spec in, a model_shape out.

They are those of transformers' own model on torch's meta device.
"""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Any

from diptych.core.records import ModelShape, ModelSpec, Parameter
from diptych.model.freeze import mark
from diptych.shape.families import family

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def inspect(model_spec: ModelSpec) -> ModelShape:
    """List every distinct parameter with its tower and its sharding unit.

    Raises:
        ConfigError: the spec cannot work, or freezes what is not there, or everything.
    """
    from diptych.model import adapters
    from diptych.model.assemble import ATTENTION
    from diptych.model.families import layer_classes
    from diptych.model.parameters import embedding_names
    from diptych.model.statistics import batch_norms
    from diptych.model.streaming import outline

    known = family(model_spec.family)
    config, sizes = _read(model_spec)
    model = outline(config, attention=ATTENTION)
    anatomy, unused = known.anatomy, known.unused(sizes)
    if model_spec.lora is not None:
        adapters.inject(model, lora=model_spec.lora, unused=unused, seed=None)
    listed = [
        Parameter(
            name=name,
            shape=tuple(parameter.shape),
            dtype="float32",
            tower=anatomy.tower(name),
            block=anatomy.block(name),
            trains=not any(fnmatch.fnmatchcase(name, pattern) for pattern in unused),
        )
        for name, parameter in model.named_parameters()
    ]
    return ModelShape(
        family=known.name,
        parameters=mark(listed, freeze=model_spec.freeze, embeddings=embedding_names(model)),
        sizes=sizes,
        tied_parameters={"lm_head.weight": anatomy.embedding} if config.tie_word_embeddings else {},
        batch_norms=tuple(batch_norms(model)),
        layer_classes=layer_classes(model),
    )


def complete_sizes(
    model_spec: ModelSpec, *, num_tokens: int | None = None
) -> dict[str, dict[str, Any]]:
    """Fill in the sizes that a spec leaves out, or those of its weights.

    Args:
        model_spec: which model.
        num_tokens: of the tokenizer, where embeddings may have to grow to it; None: as they are.

    Raises:
        ConfigError: the spec cannot work.
    """
    return _read(model_spec, num_tokens=num_tokens)[1]


def _read(
    model_spec: ModelSpec, *, num_tokens: int | None = None
) -> tuple[PreTrainedConfig, dict[str, dict[str, Any]]]:
    # Torch costs seconds to import, and this module is imported by every kedro command.
    from diptych.model import weights
    from diptych.model.families import torch_side

    side = torch_side(model_spec.family)
    if model_spec.has_files:
        config = weights.read_config(model_spec, num_tokens=num_tokens)
    else:
        config = side.config_of(
            model_spec.sizes, tie_word_embeddings=model_spec.tie_word_embeddings, tokens=None
        )
    return config, side.sizes_of(config)
