"""List a model's parameters without allocating it: a model_spec in, a model_shape out.

The list is the family's arithmetic; it is held against the real model on torch's meta device, so
that a release of transformers that changes the model is noticed here and not in a training run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diptych.core.errors import FormatError
from diptych.core.records import ModelShape, ModelSpec
from diptych.shape.families import family

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def inspect(model_spec: ModelSpec) -> ModelShape:
    """List every distinct parameter with its tower and its sharding unit.

    Raises:
        ConfigError: the spec cannot work.
        FormatError: transformers' model differs from the family's arithmetic.
    """
    # Torch costs seconds to import, and this module is imported by every kedro command.
    from diptych.model import qwen3_vl, weights
    from diptych.model.families import layer_classes
    from diptych.model.statistics import batch_norms

    known = family(model_spec.family)
    if model_spec.weights:
        config = weights.read_config(model_spec)
        sizes, tied = qwen3_vl.sizes_of(config), bool(config.tie_word_embeddings)
    else:
        sizes, tied = known.resolve(model_spec.sizes), model_spec.tie_word_embeddings
        config = qwen3_vl.config_of(sizes, tie_word_embeddings=tied, tokens=None)
    listed = known.parameters(sizes, tied=tied)
    model = _on_meta(config)
    actual = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    expected = {parameter.name: parameter.shape for parameter in listed}
    for name in sorted(set(expected) | set(actual)):
        if expected.get(name) != actual.get(name):
            raise FormatError(
                f"The parameter '{name}' is {actual.get(name, 'absent')} in transformers' model "
                f"and {expected.get(name, 'absent')} in the arithmetic of '{known.name}'",
                cure="Install the transformers release of constraints.txt",
            )
    return ModelShape(
        family=known.name,
        parameters=listed,
        sizes=sizes,
        tied_parameters=known.tied_parameters if tied else {},
        frozen=model_spec.freeze,
        batch_norms=tuple(batch_norms(model)),
        layer_classes=layer_classes(model),
    )


def _on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
