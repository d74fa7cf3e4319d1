"""Begin with what the stage before has released: a model_spec and a release in, a model_spec out.

No weight is read here, and torch is unknown.
"""

from __future__ import annotations

from pathlib import Path

from diptych.core.errors import ConfigError
from diptych.core.records import ModelSpec, Parity
from diptych.core.release import ADAPTER_FOLDER


def inherit(model: ModelSpec, release: Path, parity: Parity) -> ModelSpec:
    """Name a release as the weights that training begins with.

    Args:
        model: the family, and what trains; its sizes or weights are what the first stage began
            with, so they are left out.
        release: the folder of the stage before.
        parity: the proof of that release: nothing begins with one that was not proven. What the
            weights are is found when they are pinned, and makes another release another run.

    Raises:
        ConfigError: the release has its adapters in a folder of their own.
    """
    if (release / ADAPTER_FOLDER).is_dir():
        raise ConfigError(
            f"The release '{release}' has adapters beside its weights; what follows would begin "
            "without them",
            allowed="A release into whose weights the adapters are merged",
            cure="Set export.lora: merged in that stage",
        )
    return ModelSpec(
        family=model.family,
        weights=release.as_posix(),
        tie_word_embeddings=model.tie_word_embeddings,
        freeze=model.freeze,
        lora=model.lora,
    )
