"""Names of adapters: a parameter's full name in, whose it is out.

peft puts a layer of its own in an adapted layer's place and keeps that one in it as `base_layer`.
Files, patterns and releases have the names that a model without adapters has.
"""

from __future__ import annotations

ADAPTER = "default"
"""What peft calls the one adapter of a model."""

MAGNITUDE = f".lora_magnitude_vector.{ADAPTER}.weight"
"""What DoRA's magnitudes have after the adapted layer's name."""

_SIDE_BY_SIDE = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up"),
}
"""Layers of one module that read the same."""

_FIRST, _SECOND = f".lora_A.{ADAPTER}.", f".lora_B.{ADAPTER}."
_BASE = ".base_layer."
_PARTS = (_FIRST, _SECOND, MAGNITUDE)


def is_adapter(name: str) -> bool:
    """Tell whether a parameter is an adapter's, by its full name."""
    return any(part in name for part in _PARTS)


def plain_name(name: str) -> str:
    """Return a weight's name in a model without adapters; an adapter's own stays as it is."""
    return name.replace(_BASE, ".")


def input_name(name: str) -> str:
    """Name what a matrix reads; matrices of one module that read the same have the same name."""
    if _SECOND in name:
        return name
    path = plain_name(name).replace(_FIRST, ".").removesuffix(".weight").removesuffix(".bias")
    module, _, own = path.rpartition(".")
    return f"{module}.{_SIDE_BY_SIDE.get(own, own)}"
