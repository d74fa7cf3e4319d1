"""A layout in words, and a layout for another number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diptych.core.errors import LayoutError
from diptych.core.records import Layout, Section

_ENGINES = {"ddp": "ddp", "fsdp2": "fsdp", "zero": "zero"}
_ALWAYS = {"zero.stage"}
"""Said even where it is the default: it decides what is shared out."""


def options_of(layout: Layout) -> tuple[str, ...]:
    """Name the engine's, precision's, memory's and compile's settings that are not the default.

    Those of engines that do not run are left out, and so is the loss scale where none is used.
    """
    sections: dict[str, Section] = {
        _ENGINES[layout.engine]: getattr(layout, _ENGINES[layout.engine]),
        "mixed_precision": layout.mixed_precision,
        "memory": layout.memory,
        "compile": layout.compile,
    }
    said = [] if layout.batch_norm == "refuse" else [f"batch_norm {layout.batch_norm}"]
    if layout.attention != "auto":
        said.append(f"attention {layout.attention}")
    for name, section in sections.items():
        said += [
            f"{path} {_write(value)}"
            for path, value, is_default in _settings(section, path=name)
            if path in _ALWAYS or not is_default
            if layout.is_fp16 or "loss_scale" not in path
        ]
    return tuple(said)


def set_of(section: Section, *, path: str) -> tuple[str, ...]:
    """Name a section's settings that are not the default, each with its value."""
    return tuple(
        f"{name} {_write(value)}"
        for name, value, is_default in _settings(section, path=path)
        if not is_default
    )


def fit_layout(layout: Layout, *, world_size: int) -> Layout:
    """Return the layout for another number of ranks; the batches of a run stay the same.

    What is sharded over all ranks stays so. Of copies of a sharded model there are then more or
    fewer, where whole copies fit; else there is one, sharded over all ranks.

    Raises:
        LayoutError: the ranks are no multiple of tp x pp x cp.
    """
    together = layout.tp * layout.pp * layout.cp
    if world_size < 1 or world_size % together:
        raise LayoutError(
            f"{world_size} ranks cannot run a layout of tp {layout.tp} x pp {layout.pp} x cp "
            f"{layout.cp}",
            allowed=f"A multiple of {together} ranks",
            cure="Set train.launch.min_nodes so that as many remain, or null",
        )
    num_copies = world_size // together
    if layout.shard == 1:
        return layout.model_copy(update={"dp": num_copies})
    if layout.dp > 1 and num_copies % layout.shard == 0:
        return layout.model_copy(update={"dp": num_copies // layout.shard})
    return layout.model_copy(update={"dp": 1, "shard": num_copies})


def _settings(section: Section, *, path: str) -> Iterator[tuple[str, Any, bool]]:
    default = type(section)()
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _settings(value, path=f"{path}.{name}")
        else:
            yield f"{path}.{name}", value, value == getattr(default, name)


def _write(value: Any) -> str:
    if isinstance(value, dict):
        return "+".join(f"{name}={_write(each)}" for name, each in sorted(value.items()))
    if isinstance(value, tuple):
        return "+".join(map(_write, value)) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)
