"""Read a config.json that somebody else wrote: a path flows in, transformers' config flows out.

The file is distrusted. Its size, its depth and every number in it are bounded before transformers
sees it, and it can name no code. What its sizes mean is the family's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from diptych.core.errors import ConfigError

_MAX_BYTES = 4_000_000
_MAX_DEPTH = 12
_MAX_VALUES = 200_000
_MAX_SIZE = 2**24
"""Above every width, vocabulary and number of positions that there is."""
_MAX_REPEATS = 2**12
"""Above every number of layers; each makes Python objects, on any device."""

_KERNEL = re.compile(r"(attn|experts)_implementation|kernel")
"""Settings that transformers also takes a repository of kernels for, which are code."""
_REPEATS = re.compile(r"layers|depth|blocks|experts")
_SIZE = re.compile(
    r"^num_|_(size|dim|rank|heads|channels|positions|embeddings)$|^(width|embed_dim)$"
)


def read(path: Path) -> PreTrainedConfig:
    """Read a config that is bounded and names no code.

    Raises:
        ConfigError: the file is damaged or absurd, is of a model with code of its own or in
            quantised form, or transformers does not know it.
    """
    check(path)
    try:
        return AutoConfig.from_pretrained(path.parent, trust_remote_code=False)
    except Exception as error:
        # Transformers checks a config by using it: any error can come of a wrong value.
        # The first line may only announce what the second says.
        lines = [line.strip() for line in str(error).splitlines()] or [""]
        told = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
        raise ConfigError(
            f"{path} cannot be used: {type(error).__name__}: {told}",
            allowed="The config of a model that the installed transformers has",
            cure="Correct the file, or choose other weights",
        ) from error


def check(path: Path) -> None:
    """Refuse a config that nobody could have trained with.

    Raises:
        ConfigError: see `read`.
    """
    for number, (name, value) in enumerate(_walk(_parse(path), path=path)):
        if number > _MAX_VALUES:
            raise _absurd(path, what=f"it has more than {_MAX_VALUES} values")
        _check_kind(path, name=name, value=value)
        _check_number(path, name=name, value=value)


def _parse(path: Path) -> dict[str, Any]:
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise _absurd(path, what=f"it has {size} bytes, of at most {_MAX_BYTES}")
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _absurd(path, what=f"{type(error).__name__}: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise _absurd(path, what="it names no model_type")
    return config


def _check_kind(path: Path, *, name: str, value: Any) -> None:
    key = name.rpartition(".")[2]
    if key == "auto_map":
        raise ConfigError(
            f"{path} has '{name}': its model is code that comes with the weights",
            allowed="Models of the installed transformers; code of others is never run",
            cure="Choose weights in transformers' own format (often a repository named -hf)",
        )
    if key == "trust_remote_code" or (
        _KERNEL.search(name) and isinstance(value, str) and not value.isidentifier()
    ):
        raise ConfigError(
            f"{path} has '{name}: {value!s:.80}': it asks for code that comes from elsewhere",
            allowed="Kernels that transformers has by name, such as sdpa; code of others is never "
            "run",
            cure="Take it out of the file, or choose other weights",
        )
    if key == "quantization_config" and value is not None:
        raise ConfigError(
            f"{path} has '{name}': its weights are quantised, and cannot be trained",
            cure="Choose the weights in bf16, fp16 or fp32",
        )


def _check_number(path: Path, *, name: str, value: Any) -> None:
    # Some names that end like a size hold words.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    key = name.rpartition(".")[2]
    if value != value:
        raise _absurd(path, what=f"{name} is nan")
    most = _MAX_REPEATS if _REPEATS.search(key) else _MAX_SIZE if _SIZE.search(key) else None
    if most is not None and not -1 <= value <= most:
        raise _absurd(path, what=f"{name} is {value}, of at most {most}")


def _walk(config: dict[str, Any], *, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield every value with its dotted name; a list's items have the list's name."""
    waiting: list[tuple[str, Any, int]] = [("", config, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        if depth > _MAX_DEPTH:
            raise _absurd(path, what=f"it is nested deeper than {_MAX_DEPTH}")
        if name:
            yield name, value
        waiting.extend((each, inner, depth + 1) for each, inner in _within(name, value))


def _within(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        before = f"{name}." if name else ""
        return [(f"{before}{key}", each) for key, each in value.items()]
    return [(name, each) for each in value] if isinstance(value, list) else []


def _absurd(path: Path, *, what: str) -> ConfigError:
    return ConfigError(
        f"{path} cannot be a model's config: {what}",
        allowed="A config.json as transformers' save_pretrained writes it",
        cure="Correct the file, or choose other weights",
    )
