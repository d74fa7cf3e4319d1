"""What differs from the last attempt and from other runs, in lines for people.

In: run specs and the folders of runs. Out: lines such as `layout.engine: ddp -> fsdp2`. Nothing is
decided here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from diptych.core.addresses import without_secrets
from diptych.core.records import Placement, RunSpec
from diptych.monitor.run_folder import RunFolder

_MOST_CHARS = 60
_MOST_LINES = 12


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List the fields that differ, by dotted path.

    A field that only one of the two knows counts where it says something: an older release has
    written fewer.
    """
    before, after = flatten(old), flatten(new)
    return [
        f"{name}: {write_value(before.get(name))} -> {write_value(after.get(name))}"
        for name in [*after, *(name for name in before if name not in after)]
        if before.get(name) != after.get(name)
    ]


def placement_changes(old: Mapping[str, Any], new: Placement) -> list[str]:
    """List what differs in where a run is placed, from what an attempt noted.

    What a former release did not know counts as its default.
    """
    with suppress(ValidationError):
        old = Placement.model_validate(old).model_dump(mode="json")
    return differences(old, new.model_dump(mode="json"))


def tell_changes(spec: RunSpec, *, folder: RunFolder, schedule_sha256: str) -> list[str]:
    """Say what a person should know before the ranks start.

    Args:
        spec: what is about to run.
        folder: its folder; other runs lie beside it.
        schedule_sha256: of its schedule.
    """
    attempts = folder.read_attempts()
    if attempts:
        changed = placement_changes(attempts[-1]["placement"], spec.placement)
        return _listed("changed since the last attempt:", changed)
    return [*_tell_parent(spec, schedule_sha256=schedule_sha256), *_tell_other(spec, folder=folder)]


def _tell_parent(spec: RunSpec, *, schedule_sha256: str) -> list[str]:
    parent, checkpoint = spec.identity.parent, spec.placement.parent_checkpoint
    if parent is None or checkpoint is None:
        return []
    kept = "with everything in it" if parent.keeps == "all" else "with its weights alone"
    lines = [f"begins from step {parent.step} of run {parent.run_id}, {kept}"]
    try:
        state = json.loads((Path(checkpoint) / "state.json").read_text(encoding="utf-8"))
        was: str = state["loader"]["schedule_sha256"]
    except (OSError, ValueError, KeyError):
        return lines
    goes_on = "the data go on with the parent's next batch"
    anew = "the schedule of the data is another one: a new epoch begins with it"
    return [*lines, goes_on if was == schedule_sha256 else anew]


def _tell_other(spec: RunSpec, *, folder: RunFolder) -> list[str]:
    """Say why a new run begins where there is one already, and how it would begin from that."""
    other = _newest_other(folder)
    if other is None:
        return []
    name, identity = other
    own = spec.identity.model_dump(mode="json")
    changed = differences(identity, own)
    if spec.identity.parent is not None and identity.get("parent") is None:
        changed = [line for line in changed if not line.startswith("parent.")]
    title = f"{spec.run_id} is a new run; it differs from {name}, the newest before it:"
    lines = _listed(title, changed)
    step = RunFolder(folder.path.with_name(name)).newest_checkpoint()
    if spec.identity.parent is not None or not 0 < step < spec.identity.num_steps:
        return lines
    setting = f"{_section(folder.path.parent)}.fork_from={name}@{step}"
    return [
        *lines,
        f"to go on from that run's step {step} with these settings, stop this one and give the "
        f"same options and --params={setting}",
        f"  kedro run --pipelines=train --params={setting}",
    ]


def _newest_other(folder: RunFolder) -> tuple[str, dict[str, Any]] | None:
    """Return the name and identity of the run whose spec was written last, this one left out."""
    found = [
        path
        for path in folder.path.parent.glob("*/run_spec.json")
        if path.parent != folder.path and ".old-" not in path.parent.name
    ]
    for path in sorted(found, key=lambda path: -path.stat().st_mtime):
        try:
            return path.parent.name, json.loads(path.read_text(encoding="utf-8"))["identity"]
        except (ValueError, KeyError):
            continue
    return None


def _section(runs: Path) -> str:
    """Return the settings' section: a stage's runs lie in `stages/<name>/runs`."""
    is_stage = runs.parent.parent.name == "stages"
    return f"stages.{runs.parent.name}.train" if is_stage else "train"


def _listed(title: str, changed: list[str]) -> list[str]:
    if not changed:
        return []
    rest = len(changed) - _MOST_LINES
    more = [f"  and {rest} more"] if rest > 0 else []
    return [title, *(f"  {line}" for line in changed[:_MOST_LINES]), *more]


def flatten(values: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Return every field of nested settings by its dotted path; what is empty is None."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, prefix=f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = None if value in ({}, [], ()) else value
    return flat


def write_value(value: Any) -> str:
    """Write a value on one line, long ones cut, without what an address may hide."""
    text = value if isinstance(value, str) else "none" if value is None else json.dumps(value)
    text = without_secrets(" ".join(text.split()))
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 3]}..."
