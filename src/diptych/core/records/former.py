"""Names that FSDP1, accelerate and textbooks give to FSDP's settings.

In: a section's raw values. Out: the same under our names. What FSDP2 always does is left out; what
works otherwise here is refused with what replaced it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NOTHING: dict[str, Any] = {}
_ACCELERATE = "fsdp_"
"""accelerate puts this before every name."""

_COPIES = (
    "copies of the shards are plan.layout.replicas: set it to the number of nodes (auto has one "
    "on every node)"
)
_STRATEGIES: dict[str, dict[str, Any] | str] = {
    "FULL_SHARD": {"gather": "twice"},
    "SHARD_GRAD_OP": {"gather": "once"},
    "HYBRID_SHARD": f"{_COPIES} and gather to twice",
    "_HYBRID_SHARD_ZERO2": f"{_COPIES} and gather to once",
    "NO_SHARD": "whole weights on every rank are plan.layout.engine: ddp",
}
_NUMBERED = {
    "1": "FULL_SHARD",
    "2": "SHARD_GRAD_OP",
    "3": "NO_SHARD",
    "4": "HYBRID_SHARD",
    "5": "_HYBRID_SHARD_ZERO2",
    "HYBRID_SHARD_ZERO2": "_HYBRID_SHARD_ZERO2",
}
_NO_CHOICE = "FSDP2 has no such choice: leave it out"
_OPTIONS: dict[str, dict[str, dict[str, Any] | str]] = {
    "backward_prefetch": {
        "BACKWARD_PRE": {"prefetch_backward": 1},
        "NO_PREFETCH": {"prefetch_backward": 0},
        "NONE": {"prefetch_backward": 0},
        "BACKWARD_POST": (
            "FSDP2 gathers ahead before a unit's backward or not at all: set prefetch_backward to "
            "1 (faster) or to 0 (as little memory)"
        ),
    },
    "forward_prefetch": {"TRUE": {"prefetch_forward": 1}, "FALSE": {"prefetch_forward": 0}},
    "use_orig_params": {"TRUE": _NOTHING, "FALSE": f"parameters keep their names; {_NO_CHOICE}"},
    "auto_wrap_policy": {
        "TRANSFORMER_BASED_WRAP": _NOTHING,
        "SIZE_BASED_WRAP": "wrap names layer classes, and without it the family's blocks are taken",
        "NO_WRAP": "one group of all weights would gather the whole model: use engine ddp",
    },
    "limit_all_gathers": {"TRUE": _NOTHING, "FALSE": _NO_CHOICE},
    "sync_module_states": {"TRUE": _NOTHING, "FALSE": _NOTHING},
    "cpu_ram_efficient_loading": {
        "TRUE": "every rank reads its own rows of the weights: leave it out",
        "FALSE": _NOTHING,
    },
    "state_dict_type": {
        "SHARDED_STATE_DICT": _NOTHING,
        "FULL_STATE_DICT": (
            "checkpoints are sharded and any layout reads them; export.write makes the whole model"
        ),
        "LOCAL_STATE_DICT": "checkpoints are sharded by full parameter name: leave it out",
    },
    "activation_checkpointing": {
        "TRUE": "it is plan.layout.memory.recompute: blocks",
        "FALSE": _NOTHING,
    },
    "reshard_after_forward": {"TRUE": {"gather": "twice"}, "FALSE": {"gather": "once"}},
    "version": {"2": _NOTHING, "1": "only FSDP2 is built: leave it out"},
}
_FLAGS = ("cpu_offload", "offload_params")
_LAYERS = "transformer_layer_cls_to_wrap"
_REFUSED = {
    "min_num_params": "wrap names layer classes, and without it the family's blocks are taken",
    "mixed_precision": "it is plan.layout.precision, and plan.layout.mixed_precision",
    "mixed_precision_policy": "it is plan.layout.precision, and plan.layout.mixed_precision",
}


def translate_fsdp(given: Any) -> Any:
    """Rename what has a former name; anything else is returned as it is.

    Raises:
        ValueError: a former setting works otherwise here, or contradicts another one.
    """
    if not isinstance(given, Mapping):
        return given
    kept: dict[str, Any] = {}
    said: dict[str, str] = {}
    for name, value in given.items():
        found = _read(str(name).removeprefix(_ACCELERATE), value)
        for ours, meant in ({name: value} if found is None else found).items():
            if ours in kept and kept[ours] != meant:
                raise ValueError(
                    f"{said[ours]} means {ours}: {kept[ours]}, and {name} means {ours}: {meant}; "
                    f"keep {ours} alone"
                )
            kept[ours], said[ours] = meant, name
    return kept


def _read(name: str, value: Any) -> dict[str, Any] | None:
    """Return a former setting as ours; None if the name is none of them."""
    if name in _REFUSED:
        raise ValueError(f"{name} is no setting of fsdp: {_REFUSED[name]}")
    if name == _LAYERS:
        names = value.split(",") if isinstance(value, str) else (value or ())
        return {"wrap": tuple(each.strip() for each in names)}
    if name in _FLAGS:
        inner = value.get("offload_params", True) if isinstance(value, Mapping) else value
        return {"offload": bool(inner)}
    if name == "sharding_strategy":
        word = _word(value)
        return _choose(name, _NUMBERED.get(word, word), allowed=_STRATEGIES)
    if name in _OPTIONS:
        return _choose(name, _word(value), allowed=_OPTIONS[name])
    return None


def _word(value: Any) -> str:
    """Write a setting as FSDP1's enums do: True as TRUE, `ShardingStrategy.FULL_SHARD` cut."""
    return str(value).upper().rpartition(".")[2]


def _choose(name: str, word: str, *, allowed: Mapping[str, dict[str, Any] | str]) -> dict[str, Any]:
    if word not in allowed:
        raise ValueError(f"{name} is {word}; known are {', '.join(allowed)}")
    meant = allowed[word]
    if isinstance(meant, str):
        raise ValueError(f"{name}: {word} works otherwise here: {meant}")
    return meant
