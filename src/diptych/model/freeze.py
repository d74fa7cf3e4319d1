"""Which parameters keep their weights: towers and patterns in, the names that they mean out.

Knows names and towers alone, no weights and no torch, so that the driver can ask as the ranks do.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import get_args

from diptych.core.errors import ConfigError
from diptych.core.records import Parameter, TowerName
from diptych.shape.adapters import is_adapter, plain_name

_SETTING = "plan.model.freeze"
_TOWERS: tuple[str, ...] = get_args(TowerName)


def frozen_names(entries: Sequence[str], *, towers: Mapping[str, TowerName]) -> frozenset[str]:
    """Name the parameters that keep their weights: what is asked for, and towers with adapters.

    Adapters themselves always train; patterns are over the names of a model without any.

    Args:
        entries: names of towers, and patterns over full parameter names: `*` is any text, dots
            too, `?` one character, `[0-3]` one of several.
        towers: every parameter's full name and its tower.

    Raises:
        ConfigError: an entry means no parameter (the nearest names are given), or nothing trains.
    """
    plain = {name: plain_name(name) for name in towers if not is_adapter(name)}
    adapted = {tower for name, tower in towers.items() if name not in plain}
    frozen = {name for name in plain if towers[name] in adapted}
    for entry in entries:
        meant = [
            name
            for name, bare in plain.items()
            if (towers[name] == entry if entry in _TOWERS else fnmatchcase(bare, entry))
        ]
        if not meant:
            raise _no_match(entry, names=plain.values())
        frozen.update(meant)
    if towers and len(frozen) == len(towers):
        raise ConfigError(
            f"{_SETTING} is [{', '.join(entries)}], so that nothing trains",
            allowed="At least one parameter trains; with tied word embeddings the head's weights "
            "are the language model's",
            cure=f"Take an entry out of {_SETTING}",
        )
    return frozenset(frozen)


def mark(
    parameters: Sequence[Parameter], *, freeze: Sequence[str], embeddings: Collection[str]
) -> tuple[Parameter, ...]:
    """Say of every parameter whether it trains, and whether it is an embedding's.

    Raises:
        ConfigError: see `frozen_names`.
    """
    frozen = frozen_names(freeze, towers={each.name: each.tower for each in parameters})
    return tuple(
        each.model_copy(
            update={
                "trains": each.trains and each.name not in frozen,
                "embeds": each.name in embeddings,
            }
        )
        for each in parameters
    )


def _no_match(entry: str, *, names: Collection[str]) -> ConfigError:
    allowed = f"A tower ({', '.join(_TOWERS)}) or a pattern over full parameter names"
    if entry in _TOWERS:
        why = "with tied word embeddings the head's weights are the language model's embedding"
        return ConfigError(
            f"{_SETTING} names {entry}, and this model has no parameter there"
            + (f": {why}" if entry == "head" else ""),
            allowed=allowed,
            cure=f"Take {entry} out of {_SETTING}",
        )
    if any(name.startswith(f"{entry}.") for name in names):
        cure = f"'{entry}' is a module; write '{entry}.*' for all that is in it"
    else:
        cure = f"The nearest names are: {', '.join(nearest_names(entry, names=[*names, *_TOWERS]))}"
    return ConfigError(
        f"{_SETTING} has '{entry}', which is no tower and matches no parameter",
        allowed=allowed,
        cure=cure,
    )


def nearest_names(entry: str, *, names: Collection[str]) -> list[str]:
    """Order names by likeness to a pattern; those that differ in a number only are one."""
    bare = re.sub(r"[*?\[\]!]", "", entry)
    apart = {re.sub(r"\d+", "0", name): name for name in reversed([*names])}
    close = difflib.get_close_matches(re.sub(r"\d+", "0", bare), [*apart], n=3, cutoff=0.0)
    return [apart[each] for each in close]
