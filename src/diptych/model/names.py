"""From names in files to a model's: which tensor becomes which weight, and what does not fit.

In: a model on the meta device and the shapes in files. Out: a `Match`, or a refusal that lists what
is missing, extra or of another shape. Renames and conversions are transformers' own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Protocol

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from diptych.core.errors import ConfigError, nearest
from diptych.model.revision import Source
from diptych.shape.adapters import is_adapter, plain_name

_NUM_LISTED = 5


class Shapes(Protocol):
    """What names are matched by: shapes in files, and which tensors are no floating-point numbers.

    Opened files have both (`TensorFiles`).
    """

    shapes: dict[str, tuple[int, ...]]
    quantised: set[str]


@dataclass(frozen=True)
class Conversion:
    """Several tensors of files that become weights by transformers' arithmetic (fuse, split, turn).

    Attributes:
        target: the weight's name that transformers files it under.
        converter: transformers' own.
        sources: (name in the files, pattern of the converter that it matched).
    """

    target: str
    converter: WeightConverter
    sources: tuple[tuple[str, str], ...]

    def run(
        self, tensors: Mapping[str, torch.Tensor], *, model: PreTrainedModel
    ) -> dict[str, torch.Tensor]:
        """Convert tensors, on whatever device they are; returns them by the model's names."""
        converter = deepcopy(self.converter)
        for name, pattern in self.sources:
            converter.add_tensor(self.target, name, pattern, tensors[name])  # pyright: ignore[reportArgumentType]
        found = converter.convert(self.target, model=model, config=model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in found.items()}


@dataclass(frozen=True)
class Match:
    """Where each weight of a model comes from; names are those of a model without adapters.

    Attributes:
        direct: name in the model -> name in the files.
        converted: name in the model -> what computes it from tensors in the files.
        missing: the model's names that no tensor gives; allowed.
        tied: a weight's first name -> those of its names that the files have.
        grown: name -> rows in the files of an embedding or head that has more in the model.
    """

    direct: dict[str, str] = field(default_factory=dict)
    converted: dict[str, Conversion] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    tied: dict[str, tuple[str, ...]] = field(default_factory=dict)
    grown: dict[str, int] = field(default_factory=dict)


def match(model: PreTrainedModel, *, files: Shapes, spec: Source) -> Match:
    """Find each weight's place in the files; nothing is allocated or read.

    Args:
        model: on the meta device, its tied weights tied.
        files: what there is.
        spec: what may be missing or extra, and whether embeddings may grow.

    Raises:
        ConfigError: weights are missing, extra or misshapen and not allowed to be.
    """
    # Files know nothing of adapters; those are drawn.
    wanted = {
        plain_name(name): tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if not is_adapter(name)
    }
    direct, conversions, extra = _rename(model, files=files, wanted=wanted)
    shapes = {name: files.shapes[key] for name, key in direct.items()}
    converted: dict[str, Conversion] = {}
    for conversion in conversions:
        made = _converted_shapes(conversion, files=files, model=model)
        shapes |= made
        converted |= dict.fromkeys(made, conversion)
    missing, tied = _settle_ties(model, found=shapes, wanted=wanted)
    missing, extra = _drop_known(model, missing=missing, extra=extra)
    own = {name: shapes[name] for name in direct}
    grown = _grown(model, found=own, wanted=wanted) if spec.resize_embeddings else {}
    misshapen = {
        name: (shapes[name], wanted[name])
        for name in shapes.keys() - grown.keys()
        if shapes[name] != wanted[name]
    }
    _check_dtypes(files, used=[*direct.values(), *_sources(conversions)], spec=spec)
    _refuse(spec, missing=missing, extra=list(extra), misshapen=misshapen)
    return Match(
        direct=direct,
        converted=converted,
        missing=tuple(missing),
        tied=tied,
        grown=grown,
    )


class _Renames:
    """Transformers' table for one model: a name in the files becomes one in the model.

    Source: `convert_and_load_state_dict_in_model` of transformers, without its reading.
    """

    def __init__(self, model: PreTrainedModel, *, wanted: Iterable[str]) -> None:
        transforms = get_model_conversion_mapping(model)
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._converters = converters
        self._prefix = model.base_model_prefix
        self._known = dict.fromkeys(wanted, True)
        self.by_pattern = {name: each for each in converters for name in each.source_patterns}

    def find(self, key: str) -> tuple[str, str | None]:
        """Return the new name, and the pattern of the converter that is to make it, if any."""
        found = rename_source_key(key, self._renamings, self._converters, self._prefix, self._known)
        if found[0] not in self._known and key in self._known:
            return rename_source_key(key, [], [], self._prefix, self._known)
        return found


def _rename(
    model: PreTrainedModel, *, files: Shapes, wanted: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, str], list[Conversion], dict[str, str]]:
    """Sort the files' tensors by what becomes of them; the extra ones with their new names."""
    renames = _Renames(model, wanted=wanted)
    direct: dict[str, str] = {}
    groups: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    extra: dict[str, str] = {}
    for key in sorted(files.shapes, key=dot_natural_key):
        name, pattern = renames.find(key)
        if name not in wanted:
            extra[key] = name
        elif pattern is not None:
            groups[name].append((key, pattern))
        elif name in direct:
            raise ConfigError(
                f"The files have '{name}' twice: as '{direct[name]}' and as '{key}'",
                cure="Save the weights anew with transformers' save_pretrained",
            )
        else:
            direct[name] = key
    conversions = [
        Conversion(target=name, converter=renames.by_pattern[found[0][1]], sources=tuple(found))
        for name, found in groups.items()
    ]
    return direct, conversions, extra


def _converted_shapes(
    conversion: Conversion, *, files: Shapes, model: PreTrainedModel
) -> dict[str, tuple[int, ...]]:
    """Convert shapes alone, on the meta device."""
    empty = {key: torch.empty(files.shapes[key], device="meta") for key, _ in conversion.sources}
    try:
        found = conversion.run(empty, model=model)
    except Exception as error:
        shapes = ", ".join(f"{key} {list(files.shapes[key])}" for key in list(empty)[:_NUM_LISTED])
        raise ConfigError(
            f"Transformers cannot make '{conversion.target}' of {shapes}: {error}",
            cure="Choose weights that the installed transformers loads",
        ) from error
    return {name: tuple(tensor.shape) for name, tensor in found.items()}


def _settle_ties(
    model: PreTrainedModel, *, found: Mapping[str, object], wanted: Mapping[str, object]
) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """List what is missing, and which names of a tied weight there are.

    Of names for one weight a single one has to be there.
    """
    tied: dict[str, tuple[str, ...]] = {}
    missing = dict.fromkeys(wanted)
    for names in _names_by_weight(model).values():
        there = tuple(name for name in names if name in found)
        if len(names) > 1:
            tied[names[0]] = there
        for name in names if there else names[1:]:
            del missing[name]
    return [name for name in missing if name not in found], tied


def _names_by_weight(model: PreTrainedModel) -> dict[int, list[str]]:
    """List each parameter's names, by its identity."""
    names_of: defaultdict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not is_adapter(name):
            names_of[id(parameter)].append(plain_name(name))
    return names_of


def _drop_known(
    model: PreTrainedModel, *, missing: list[str], extra: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Leave out what transformers knows to be of no use, such as buffers of older releases."""
    known = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(extra.values()))
    model._adjust_missing_and_unexpected_keys(known)  # pyright: ignore[reportArgumentType]
    return (
        [name for name in missing if name in known.missing_keys],
        {key: name for key, name in extra.items() if name in known.unexpected_keys},
    )


def _grown(
    model: PreTrainedModel,
    *,
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
) -> dict[str, int]:
    """Find the embedding and the head, where the files have fewer rows than the model."""
    names_of = _names_by_weight(model)
    grown = {}
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        for each in part.parameters() if part is not None else ():
            for name in names_of[id(each)]:
                if name in found and _is_part(found[name], of=wanted[name]):
                    grown[name] = found[name][0]
    return grown


def _is_part(shape: tuple[int, ...], *, of: tuple[int, ...]) -> bool:
    """Whether a shape has fewer rows than another, and the same beside."""
    return shape[1:] == of[1:] and 0 < shape[0] < of[0]


def _sources(conversions: Iterable[Conversion]) -> list[str]:
    return [key for conversion in conversions for key, _ in conversion.sources]


def _check_dtypes(files: Shapes, *, used: Sequence[str], spec: Source) -> None:
    # Batch norms count their batches with an integer.
    found = [
        key for key in used if key in files.quantised and not key.endswith("num_batches_tracked")
    ]
    if found:
        raise ConfigError(
            f"{len(found)} of the weights '{spec.weights}' are no floating-point numbers of 16, 32 "
            f"or 64 bits: {_listed(found)}",
            cure="Choose the weights in bf16, fp16 or fp32",
        )


def _refuse(
    spec: Source,
    *,
    missing: Sequence[str],
    extra: Sequence[str],
    misshapen: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    """List all that does not fit and is not allowed to."""
    left = {
        "missing": _left(
            missing, patterns=spec.allow_missing, setting=f"{spec.setting}.allow_missing"
        ),
        "extra": _left(extra, patterns=spec.allow_extra, setting=f"{spec.setting}.allow_extra"),
    }
    left = {kind: names for kind, names in left.items() if names}
    problems = [f"{len(names)} {kind}: {_listed(names)}" for kind, names in left.items()]
    if misshapen:
        shown = [
            f"{name} is {list(ours)}, the model's is {list(theirs)}"
            for name, (ours, theirs) in sorted(misshapen.items())
        ]
        problems.append(f"{len(misshapen)} of another shape: {_listed(shown)}")
    if not problems:
        return
    cure = "Choose weights of this model"
    if left:
        settings = " and ".join(f"{spec.setting}.allow_{kind}" for kind in left)
        cure += f", or name those that are meant in {settings} (globs over names)"
    raise ConfigError(
        f"The weights '{spec.weights}' do not fit the model. {'. '.join(problems)}",
        allowed="Every weight of the model once, in its shape, and no other",
        cure=cure,
    )


def _left(names: Sequence[str], *, patterns: Sequence[str], setting: str) -> list[str]:
    """List the names that no pattern allows; a pattern that allows none is refused."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"{setting} names '{pattern}', and no weight of that name is "
                f"{setting.rpartition('_')[2]}",
                allowed=nearest(pattern, allowed=list(names)[:_NUM_LISTED]),
                cure="Correct the pattern, or leave it out",
            )
    return [name for name in names if not any(fnmatchcase(name, each) for each in patterns)]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_LISTED} more" if len(names) > _NUM_LISTED else ""
    return ", ".join(names[:_NUM_LISTED]) + more
