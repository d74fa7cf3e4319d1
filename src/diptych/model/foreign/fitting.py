"""Which of a checkpoint's tensors are the model's, and what they are called without wrappers.

In: tensors by the names in the files, a config. Out: tensors by names that transformers takes, or a
refusal that lists what is missing, extra or of another shape.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from transformers import PreTrainedConfig, PreTrainedModel

from diptych.core.errors import ConfigError
from diptych.core.records import ModelSpec
from diptych.model.assemble import ATTENTION
from diptych.model.foreign.stored import Stored
from diptych.model.names import match
from diptych.model.streaming import outline
from diptych.shape.families import family

_WRAPPERS = re.compile(
    r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
)
_FLAT = re.compile(r"(^|\.)_?flat_param")
_BESIDE = re.compile(
    r"(optim\w*|lr_scheduler\w*|scheduler\w*|train_state|trainer|data\w*|rng\w*|ema\w*|step|steps"
    r"|epoch|iteration|global_step)(\.|$)"
)
"""First parts of names of what trainers save beside the model."""

_MOST = 5


@dataclass
class _Shapes:
    """What names are matched by, in the place of opened files."""

    shapes: dict[str, tuple[int, ...]]
    quantised: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Fitted:
    """The model's tensors by plain names; what stood before them; what was left out."""

    tensors: dict[str, Stored]
    prefix: str
    left_out: tuple[str, ...]


def fit(tensors: Mapping[str, Stored], *, config: PreTrainedConfig) -> Fitted:
    """Take wrappers off the names, and what else is not the model's out.

    Raises:
        ConfigError: the family is not built, or the tensors are not those of the config's model.
    """
    spec = ModelSpec(family=family(config.model_type).name, weights="the checkpoint")
    model = outline(config, attention=ATTENTION)
    plain = _unwrap(tensors)
    refusals: list[ConfigError] = []
    for prefix in _prefixes(plain, wanted=model.state_dict().keys()):
        try:
            return _fit_below(prefix, plain, model=model, spec=spec)
        except ConfigError as error:
            refusals.append(error)
    raise ConfigError(
        refusals[0].found,
        allowed="Every weight once, under transformers' name, maybe with wrappers before it",
        cure="Name the config.json that the weights were trained with (--config)",
    ) from None


def _unwrap(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    plain: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        if _FLAT.search(name):
            raise ConfigError(
                f"The checkpoint has '{name}': FSDP1's flattened weights, whose shapes only that "
                "trainer knows",
                allowed="A sharded or a full state dict",
                cure="Save it with StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT",
            )
        unwrapped = _WRAPPERS.sub("", name)
        if unwrapped in plain:
            raise ConfigError(
                f"The checkpoint has '{unwrapped}' twice, once as '{name}'",
                cure="Save the model's state dict alone",
            )
        plain[unwrapped] = tensor
    return plain


def _prefixes(names: Iterable[str], *, wanted: Iterable[str]) -> list[str]:
    """List what may stand before the model's own names, the most frequent first.

    Names of older releases are none of the model's, so that nothing and `model.` are always tried.
    """
    known, counts = set(wanted), Counter({"": 0, "module.": 0, "model.": 0})
    for name in names:
        parts = name.split(".")
        for number in range(len(parts)):
            if ".".join(parts[number:]) in known:
                counts[".".join([*parts[:number], ""]) if number else ""] += 1
    return [prefix for prefix, _ in counts.most_common(8)]


def _fit_below(
    prefix: str, plain: Mapping[str, Stored], *, model: PreTrainedModel, spec: ModelSpec
) -> Fitted:
    below = {
        name.removeprefix(prefix): tensor
        for name, tensor in plain.items()
        if name.startswith(prefix) and not _BESIDE.match(name)
    }
    left_out = [name for name in plain if _BESIDE.match(name)]
    others = [name for name in plain if not name.startswith(prefix) and not _BESIDE.match(name)]
    if others:
        raise ConfigError(
            f"{len(others)} tensors are not the model's: {', '.join(sorted(others)[:_MOST])}"
        )
    shapes = _Shapes({name: tensor.shape for name, tensor in below.items()})
    shapes.quantised = {
        name for name, tensor in below.items() if not tensor.dtype.is_floating_point
    }
    match(model, files=shapes, spec=spec)
    return Fitted(tensors=below, prefix=prefix, left_out=tuple(left_out))
