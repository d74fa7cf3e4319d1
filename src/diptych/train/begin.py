"""What a forked run begins with: a parent's checkpoint in, a restored engine and counters out.

Every rank calls it. The parent's folder is only read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from diptych.core.errors import FormatError
from diptych.core.hashing import sha256_file
from diptych.core.records import LoaderState, Parent
from diptych.parallel import storage
from diptych.parallel.engine import Engine
from diptych.parallel.mesh import World
from diptych.parallel.moments import EMA
from diptych.train.checkpoints import state_at
from diptych.train.loop import TrainState

_LOG = logging.getLogger(__name__)
_MASKED_BEFORE = "masked-parent.jsonl"


def begin_from(
    checkpoint: Path,
    *,
    engine: Engine,
    parent: Parent,
    schedule_sha256: str,
    run_folder: Path,
    world: World,
) -> tuple[TrainState, LoaderState]:
    """Load what a fork keeps of its parent.

    Where the schedule is the parent's, the loader goes on with the next batch; where it is another,
    a new epoch begins with it. Samples that the parent masked stay masked in the first case.

    Args:
        checkpoint: the parent's; the launcher has compared its files with their checksums.
        engine: takes the tensors.
        parent: which checkpoint it must be, and what is kept of it.
        schedule_sha256: of the fork's own schedule.
        run_folder: the fork's.
        world: this rank's place.

    Raises:
        FormatError: it is another checkpoint, or lacks what this model trains.
    """
    sums = checkpoint / "checksums.json"
    if not sums.is_file() or sha256_file(sums) != parent.sha256:
        raise FormatError(
            f"The checkpoint '{checkpoint}' is gone or another than this run was forked from",
            cure="Fork anew, or restore the parent's checkpoint",
        )
    stored = storage.read_state(checkpoint)
    keeps_all = parent.keeps == "all"
    _take(checkpoint, engine=engine, num_updates=stored["num_updates"] if keeps_all else 0)
    if keeps_all:
        engine.restore(stored.get("engine", {}))
    former = LoaderState.model_validate(stored["loader"])
    loader = _go_on(former, schedule_sha256=schedule_sha256)
    if world.is_first:
        _note_masked(loader, path=run_folder / _MASKED_BEFORE)
        went = "goes on" if former.schedule_sha256 == schedule_sha256 else "begins a new epoch"
        _LOG.info("forked from step %d of run %s; the data %s", former.step, parent.run_id, went)
    return state_at(loader, num_masked=stored["num_masked"]), loader


def count_former_updates(parent: Parent, *, state: TrainState) -> int:
    """Count the updates before the optimizer began anew: the parent's, if weights alone are kept.

    Args:
        parent: the checkpoint that the run was forked from.
        state: of the fork, now or later.
    """
    if parent.keeps == "all":
        return 0
    return parent.step - sum(step < parent.step for step in state.skipped_steps)


def _take(checkpoint: Path, *, engine: Engine, num_updates: int) -> None:
    """Read weights, and moments if there were updates that count; the rest stays as it begins."""
    tensors = engine.tensors()
    stored = storage.stored_shapes(checkpoint)
    wanted = {
        name: tensor
        for name, tensor in tensors.items()
        if _is_weight(name) or (num_updates and (name in stored or not _is_mean(name)))
    }
    _check_shapes(wanted, stored=stored, checkpoint=checkpoint)
    storage.read_into(checkpoint, tensors=wanted)
    with torch.no_grad():
        for name in filter(_is_mean, tensors.keys() - wanted.keys()):
            # A mean that was not kept begins with the weights, as it does in a new run.
            of = name.removeprefix(storage.OPTIMIZER_PREFIX).removesuffix(f".{EMA}")
            tensors[name].copy_(tensors[storage.MODEL_PREFIX + of])
    engine.take(tensors, num_updates=num_updates)


def _check_shapes(
    wanted: Mapping[str, torch.Tensor], *, stored: Mapping[str, tuple[int, ...]], checkpoint: Path
) -> None:
    problems = [
        f"{name} is {list(stored[name]) if name in stored else 'missing'}, the run needs "
        f"{list(tensor.shape)}"
        for name, tensor in wanted.items()
        if stored.get(name) != tuple(tensor.shape)
    ]
    extra = filter(_is_weight, stored.keys() - wanted.keys())
    problems += [f"{name} is not in the model" for name in extra]
    if problems:
        raise FormatError(
            f"The parent's {checkpoint.name} does not fit: {'; '.join(sorted(problems)[:5])}",
            cure="Restore the settings of the parent, or set train.fork_keeps: weights",
        )


def _is_weight(name: str) -> bool:
    return name.startswith(storage.MODEL_PREFIX)


def _is_mean(name: str) -> bool:
    return name.startswith(storage.OPTIMIZER_PREFIX) and name.endswith(f".{EMA}")


def _go_on(former: LoaderState, *, schedule_sha256: str) -> LoaderState:
    if former.schedule_sha256 == schedule_sha256:
        return former
    return former.model_copy(
        update={
            "epoch": former.epoch + 1,
            "first_step": former.step,
            "schedule_sha256": schedule_sha256,
            "masked_keys": (),
        }
    )


def _note_masked(loader: LoaderState, *, path: Path) -> None:
    """Have the fork's own checkpoints name what its parent masked, too."""
    lines = [json.dumps({"step": loader.step, "key": key}) + "\n" for key in loader.masked_keys]
    if lines:
        path.write_text("".join(lines), encoding="utf-8")
