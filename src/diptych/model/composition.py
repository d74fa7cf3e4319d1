"""A composition whose towers were trained apart: files of each in, one config and one match out.

Each tower is matched as the model that it was saved from, so names are transformers' own; then it
gets its place in the composition. What neither has, such as the connector, is drawn.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from diptych.core.errors import ConfigError
from diptych.core.records import ModelSpec, TokenIds
from diptych.model import config_file, llava
from diptych.model.names import Match, match
from diptych.model.revision import (
    TowerSource,
    check_digest,
    find_config,
    find_folder,
    tower_sources,
)
from diptych.model.tensor_files import TensorFiles
from diptych.model.tiles import part_sizes
from diptych.shape.adapters import is_adapter, plain_name
from diptych.shape.llava import ANATOMY, TOWERS
from diptych.shape.tiles import CLASS_TOKENS

_LOG = logging.getLogger(__name__)

_FAMILY = "llava"
_KINDS = {"vision": TOWERS, "language": ("llama", "qwen2", "qwen3")}
"""What a tower's config may be, by transformers' names."""

_WITH_TEXT = ("siglip", "clip")
"""Models of which a vision tower is one half."""

_GROUPS = {"vision": "vision", "language": "text"}

_OTHERS = {
    "vision": (
        "text_model.*",
        "text_projection.*",
        "visual_projection.*",
        "logit_scale",
        "logit_bias",
        "vision_model.head.*",
        "head.*",
        "vision_model.embeddings.position_ids",
    ),
    "language": ("*.rotary_emb.inv_freq",),
}
"""Names in files of parts that no composition has."""


def read_config(spec: ModelSpec, *, tokens: TokenIds | None = None) -> PreTrainedConfig:
    """Write the composition's config from its towers' own and the sizes that are given besides.

    Args:
        spec: names the towers' weights.
        tokens: the processor's; without them token ids stay the defaults.

    Raises:
        ConfigError: the family is none of compositions, a tower is of another kind, or sizes are
            given that are not the tower's.
    """
    if spec.family != _FAMILY:
        raise ConfigError(
            f"plan.model.towers is set for a model of the family '{spec.family}'",
            allowed=f"Compositions, which are the family {_FAMILY}",
            cure=f"Set plan.model.family: {_FAMILY}, or plan.model.towers: null",
        )
    sizes = {group: dict(values) for group, values in spec.sizes.items()}
    tied = spec.tie_word_embeddings
    for tower, source in tower_sources(spec).items():
        config = _read_tower(tower, source=source)
        own = part_sizes(config)
        if tower == "language":
            tied = config.tie_word_embeddings
        elif "vision_use_head" in own:
            # The head makes one vector of an image, which no connector reads.
            own["vision_use_head"] = False
        group = _GROUPS[tower]
        _check_same(sizes.get(group, {}), own=own, group=group, source=source)
        sizes[group] = own
    model = sizes.setdefault("model", {})
    if sizes.get("vision", {}).get("model_type") not in (None, *CLASS_TOKENS):
        model.setdefault("vision_feature_select_strategy", "full")
    return llava.config_of(sizes, tie_word_embeddings=tied, tokens=tokens)


def find(model: PreTrainedModel, *, spec: ModelSpec) -> tuple[TowerFiles, Match]:
    """Open the towers' files, and find the place of each of their weights in a composition.

    Args:
        model: on the meta device, its tied weights tied.
        spec: names the towers' weights.

    Returns:
        The files, and a match in which all is missing that they do not have.

    Raises:
        ConfigError: a tower's files are not those asked for, or do not fit it.
    """
    files = TowerFiles()
    direct: dict[str, str] = {}
    missing: list[str] = []
    tied: dict[str, tuple[str, ...]] = {}
    grown: dict[str, int] = {}
    sources = tower_sources(spec)
    for tower, source in sources.items():
        own = files.add(tower, source=source)
        found = match(_outline(tower, config=model.config), files=own, spec=source)
        assert not found.converted, "the kinds of towers need renames alone"
        direct |= {_name(tower, name): f"{tower}:{key}" for name, key in found.direct.items()}
        missing += [_name(tower, name) for name in found.missing]
        tied |= {
            _name(tower, name): tuple(_name(tower, each) for each in names)
            for name, names in found.tied.items()
        }
        grown |= {_name(tower, name): rows for name, rows in found.grown.items()}
    return files, Match(
        direct=direct,
        missing=(*missing, *_drawn(model, towers=sources)),
        tied=tied,
        grown=grown,
    )


class TowerFiles:
    """The opened files of several towers; a name is the tower's, a colon, and the file's own.

    Attributes:
        shapes: of every tensor that a tower may take.
    """

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, TensorFiles] = {}

    def add(self, tower: str, *, source: TowerSource) -> TensorFiles:
        """Open a tower's files, and return them without what belongs to other parts."""
        folder = find_folder(source)
        if source.weights_sha256 is not None:
            check_digest(folder, spec=source)
        files = TensorFiles(folder)
        left_out = Counter(
            pattern
            for name in files.shapes
            for pattern in _OTHERS[tower]
            if fnmatchcase(name, pattern)
        )
        files.shapes = {
            name: shape
            for name, shape in files.shapes.items()
            if not any(fnmatchcase(name, pattern) for pattern in left_out)
        }
        if left_out:
            _LOG.info(
                "%s: of '%s' is left out what no composition has: %s",
                source.setting,
                source.weights,
                ", ".join(f"{pattern} ({num})" for pattern, num in left_out.items()),
            )
        self.shapes |= {f"{tower}:{name}": shape for name, shape in files.shapes.items()}
        self._files[tower] = files
        return files

    def read(self, name: str, *, slices: Sequence[slice] | None = None) -> torch.Tensor:
        """Return a tensor, or a part of it, in its own dtype on the CPU."""
        tower, _, key = name.partition(":")
        return self._files[tower].read(key, slices=slices)


def _read_tower(tower: str, *, source: TowerSource) -> Any:
    """Read a tower's config, out of that of a model of which it is one half."""
    config: Any = config_file.read(find_config(source))
    kind = config.model_type
    if tower == "vision" and kind in _WITH_TEXT:
        config = config.vision_config
    if config.model_type not in _KINDS[tower]:
        halves = f", or {' and '.join(_WITH_TEXT)}" if tower == "vision" else ""
        raise ConfigError(
            f"{source.setting}.weights is '{source.weights}', a model of the kind '{kind}'",
            allowed=f"{', '.join(_KINDS[tower])}{halves}",
            cure="Choose weights of such a model",
        )
    return config


def _check_same(
    given: Mapping[str, Any], *, own: Mapping[str, Any], group: str, source: TowerSource
) -> None:
    """Refuse a size that is given and is another one than the tower's."""
    for name, value in given.items():
        if value is not None and value != own.get(name):
            found = f"has {own[name]}" if name in own else "has no such size"
            raise ConfigError(
                f"plan.model.sizes.{group}.{name} is {value}, and '{source.weights}' {found}",
                allowed="A tower's weights bring its sizes; what is given besides must agree",
                cure=f"Set plan.model.sizes.{group}: null",
            )


def _outline(tower: str, *, config: Any) -> PreTrainedModel:
    """Make a tower's own model, of the composition's sizes, on the meta device."""
    kind: Any = AutoModel if tower == "vision" else AutoModelForCausalLM
    part = deepcopy(config.vision_config if tower == "vision" else config.text_config)
    part.tie_word_embeddings = config.tie_word_embeddings
    with torch.device("meta"):
        return kind.from_config(part, dtype=torch.float32)


def _name(tower: str, name: str) -> str:
    """Return the composition's name of a tower's weight."""
    if tower == "vision":
        return f"{ANATOMY.vision}.{name}"
    inner = name.removeprefix("model.")
    return f"{ANATOMY.decoder}.{inner}" if inner != name else name


def _drawn(model: PreTrainedModel, *, towers: Mapping[str, object]) -> list[str]:
    """Name the weights that are in none of the towers, each once."""
    return [
        plain_name(name)
        for name, _ in model.named_parameters()
        if not is_adapter(name) and _tower(plain_name(name)) not in towers
    ]


def _tower(name: str) -> str:
    found = ANATOMY.tower(name)
    return "language" if found == "head" else found
