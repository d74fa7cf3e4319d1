"""The driver's part of the preflight: what can be said of a run before any rank starts.

In: a run spec and the folder of runs. Out: a `Preflight`. With little to read it takes a moment;
`kedro check` has it look closer. No torch, unless the size of a checkpoint follows from a model
that was never saved.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from diptych.core import provenance
from diptych.core.errors import DiptychError, LayoutError
from diptych.core.files import write_text
from diptych.core.records import Check, Manifest, Preflight, RunSpec
from diptych.core.units import format_bytes
from diptych.data.files.store import is_url
from diptych.data.shards.manifest import load_manifest
from diptych.launch.corpus import Depth, check_corpus
from diptych.launch.job import launcher
from diptych.launch.preflight import check_machine
from diptych.launch.surroundings import (
    check_git,
    check_network,
    check_tracker,
    check_versions,
)
from diptych.model.inspect import inspect
from diptych.monitor.run_folder import RunFolder
from diptych.plan.states import States

_IDLE_WARNED = 0.1


def check_run(spec: RunSpec, *, folder: RunFolder, depth: Depth) -> Preflight:
    """Look at everything that needs no rank, and keep what was found in the run's folder.

    Args:
        spec: what is about to run.
        folder: its folder, which need not be there yet.
        depth: how closely data is looked at.
    """
    return keep(
        Preflight(
            run_id=spec.run_id,
            host=socket.gethostname(),
            time_s=round(time.time(), 3),
            checks=tuple(_checks(spec, folder=folder, depth=depth)),
        ),
        folder=folder,
    )


def keep(preflight: Preflight, *, folder: RunFolder) -> Preflight:
    """Write what was found into the run's folder, where that can be written to."""
    # That it cannot be written to is said by the check of the folders.
    with suppress(OSError):
        write_text(folder.path / "preflight.json", text=preflight.model_dump_json(indent=2) + "\n")
    return preflight


def refuse_failed(preflight: Preflight) -> None:
    """Refuse to start what cannot work.

    Raises:
        LayoutError: names every check that failed, with its cure.
    """
    if preflight.failed:
        told = "\n".join(
            f"  - {check.name}: {check.found}" + (f"\n    {check.cure}" if check.cure else "")
            for check in preflight.failed
        )
        raise LayoutError(
            f"Run {preflight.run_id} would fail:\n{told}",
            cure="\nkedro check looks at all of it, without training",
        )


def attempt(name: str, function: Callable[[], object], *, found: str) -> Check:
    """Make a check of what refuses by an error; `found` is said where it does not."""
    try:
        function()
    except DiptychError as error:
        return _refusal(name, error=error)
    return Check(name=name, status="pass", found=found)


def _refusal(name: str, *, error: DiptychError) -> Check:
    told = ". ".join(filter(None, [error.found, error.allowed]))
    return Check(name=name, status="fail", found=told, cure=error.cure.strip())


def _checks(spec: RunSpec, *, folder: RunFolder, depth: Depth) -> Iterator[Check]:
    layout = spec.placement.layout
    yield check_launcher(spec)
    yield attempt(
        "machine",
        # Its offload's room needs the model's size, which launching looks at.
        lambda: check_machine(layout, num_parameters=None, optimizer=spec.identity.optimizer.kind),
        found=f"{layout.engine} on {layout.world_size} x {layout.device}, {layout.precision}",
    )
    yield check_folders(spec, folder=folder)
    yield check_room(spec, folder=folder)
    try:
        manifest = load_manifest(Path(spec.placement.manifest))
    except DiptychError as error:
        yield Check(name="manifest", status="fail", found=error.found, cure=error.cure)
    else:
        yield check_manifest(manifest, spec=spec)
        yield from check_corpus(manifest, shards=spec.placement.shards, depth=depth)
    yield check_batch(spec)
    yield check_versions()
    yield check_git(provenance.read())
    yield check_tracker(None)
    yield check_network(spec, logs=folder.logs)


def check_launcher(spec: RunSpec) -> Check:
    """Look for what starts the ranks."""
    kind = spec.placement.launch.kind
    try:
        found = launcher(kind).check(spec)
    except DiptychError as error:
        return _refusal("launcher", error=error)
    return Check(name="launcher", status="pass", found=f"{kind}: {found}")


def check_manifest(manifest: Manifest, *, spec: RunSpec) -> Check:
    """Compare the manifest at hand with the one that names the run."""
    if manifest.sha256 != spec.identity.manifest_sha256:
        return Check(
            name="manifest",
            status="fail",
            found=f"{spec.placement.manifest} is of other data than the run",
            cure="The same command composes the run anew from this data, under another name",
        )
    refused = f", {manifest.num_quarantined} refused" if manifest.num_quarantined else ""
    found = f"{manifest.sha256[:12]}, {len(manifest.sources)} sources{refused}"
    return Check(name="manifest", status="pass", found=found)


def check_folders(spec: RunSpec, *, folder: RunFolder) -> Check:
    """Look for what ranks read, and whether they may write where they will."""
    placement = spec.placement
    read = [placement.sample_costs, placement.processor]
    read += [] if is_url(placement.shards) else [placement.shards]
    written = [str(folder.path), placement.image_cache, placement.vision_features]
    missing = [path for path in read if not Path(path).exists()]
    if missing:
        return Check(
            name="folders",
            status="fail",
            found=f"{', '.join(missing)} not found from {Path.cwd()}",
            cure="Make it: kedro run --pipelines=prepare; or start in the project's folder",
        )
    closed = [path for path in filter(None, written) if not _can_write(Path(path))]
    if closed:
        return Check(
            name="folders",
            status="fail",
            found=f"{', '.join(closed)} cannot be written to",
            cure="Change its owner, or name another folder in folders.runs or train",
        )
    return Check(name="folders", status="pass", found=f"{folder.path} can be written to")


def check_room(spec: RunSpec, *, folder: RunFolder) -> Check:
    """Hold the checkpoints that will be kept against the free room of their disk."""
    try:
        one = checkpoint_bytes(spec, folder=folder)
    except DiptychError as error:
        found = f"a checkpoint's size is not known: {error.found}"
        return Check(name="disk", status="skip", found=found)
    num = num_checkpoints(spec)
    there = sum(_size(path) for path in folder.checkpoints.glob("[sw]*-*"))
    free = shutil.disk_usage(_existing(folder.path)).free
    needed = max(0, one * num - there)
    told = (
        f"{num} checkpoints of {format_bytes(one)}, {format_bytes(free)} free in "
        f"{_existing(folder.path)}"
    )
    cure = "Free some room, set folders.runs to a larger disk, or lower train.keep_checkpoints"
    # The last one is written before the first is removed; what is there already is replaced.
    if free < one:
        return Check(name="disk", status="fail", found=f"{told}: not one fits", cure=cure)
    if free < needed:
        return Check(name="disk", status="warn", found=f"{told}: not all fit", cure=cure)
    return Check(name="disk", status="pass", found=told)


def checkpoint_bytes(spec: RunSpec, *, folder: RunFolder) -> int:
    """Return the size of a checkpoint: that of the newest, else what the plan says of the model.

    Without a plan the model is inspected, for which torch is imported.
    """
    step = folder.newest_checkpoint()
    if step:
        return _size(folder.checkpoints / f"step-{step:08d}")
    if spec.placement.checkpoint_bytes is not None:
        return spec.placement.checkpoint_bytes
    identity = spec.identity
    shape = inspect(identity.model)
    states = States(optimizer=identity.optimizer, has_mean=identity.ema_decay is not None)
    return states.checkpoint_bytes(shape)


def num_checkpoints(spec: RunSpec) -> int:
    """Count what lies on the disk at once: what is kept, and the one that is being written."""
    placement, num_steps = spec.placement, spec.identity.num_steps
    num = placement.keep_checkpoints + 1
    num += 1 if placement.keep_best else 0
    num += num_steps // placement.keep_every_steps if placement.keep_every_steps else 0
    num_saves = -(-num_steps // placement.checkpoint_every_steps)
    return min(num, num_saves + 1)


def check_batch(spec: RunSpec) -> Check:
    """Say how a global batch is shared: by how many micro-batches, and what of them is filler."""
    schedule, layout = spec.identity.schedule, spec.placement.layout
    group = 1 if schedule.mode == "pack" else schedule.group
    unit = min(layout.micro_batch, group)
    num_units = -(-schedule.global_batch // unit)
    per_rank = layout.micro_batch // unit
    accumulation = -(-num_units // (layout.world_size * per_rank))
    room = layout.world_size * layout.micro_batch * accumulation
    idle = 1 - schedule.global_batch / room
    told = (
        f"{schedule.global_batch} rows = {layout.world_size} ranks x {layout.micro_batch} rows x "
        f"{accumulation} micro-batches"
    )
    if idle <= 0:
        return Check(name="batch", status="pass", found=told)
    # Units are dealt out by cost, so at least so many ranks have room left.
    short = min(layout.world_size, -(-(room - schedule.global_batch) // unit))
    told = (
        f"{told} - {room - schedule.global_batch} of filler ({idle:.0%} idle; up to {short} ranks)"
    )
    multiple = layout.world_size * layout.micro_batch
    return Check(
        name="batch",
        status="warn" if idle > _IDLE_WARNED else "pass",
        found=told,
        cure=f"Make train.schedule.global_batch a multiple of {multiple}, or the micro-batch less",
    )


def _can_write(path: Path) -> bool:
    return os.access(_existing(path), os.W_OK | os.X_OK)


def _existing(path: Path) -> Path:
    """Return the folder itself, or the nearest around it that is there."""
    return next(each for each in (path, *path.absolute().parents) if each.is_dir())


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
