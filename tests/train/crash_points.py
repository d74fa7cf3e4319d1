"""Faults at points inside a save, each in a process of its own; what is resumed afterwards.

A child saves step 1 whole, then step 2 on a disk that fails at one operation. If that killed it,
the next process resumes; if it was an error, the child goes on, saves step 3 and leaves.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from diptych.parallel import storage
from diptych.train.retention import Keep
from tests.train.faults import EXIT_CODE, KINDS, Disk, Weights, after, checkpoints, disk


@dataclass(frozen=True)
class Point:
    """Where a save is hit, and how.

    Attributes:
        kind: What happens.
        where: Of the save's operations, from 0 (the first) to 1 (the last).
        saving: async or sync.
        keeps: How many checkpoints are kept: with 1 the save removes one, too.
    """

    kind: str
    where: float
    saving: str
    keeps: int


def draw(num_points: int, *, seed: int) -> list[Point]:
    """Draw points, every kind as often."""
    numbers = random.Random(seed)
    return [
        Point(
            KINDS[number % len(KINDS)],
            numbers.random(),
            numbers.choice(["async", "sync"]),
            numbers.choice([1, 2]),
        )
        for number in range(num_points)
    ]


def count_operations(folder: Path, *, keeps: int) -> int:
    """Count the operations of a save."""
    with disk() as whole:
        return _save_two(whole, folder, saving="sync", keeps=keeps)


def hit_all(num_points: int, *, seed: int, folder: Path) -> dict[str, str]:
    """Hit saves at so many points; return what is wrong, by point."""
    counts = {keeps: count_operations(folder / f"count-{keeps}", keeps=keeps) for keeps in (1, 2)}
    # Or there are hardly different points.
    assert min(counts.values()) > 15
    wrong: dict[str, str] = {}
    for number, point in enumerate(draw(num_points, seed=seed)):
        found = hit(point, folder=folder / str(number), num_operations=counts[point.keeps])
        if found is not None:
            wrong[str(point)] = found
    return wrong


def hit(point: Point, *, folder: Path, num_operations: int) -> str | None:
    """Hit a save at a point, resume, and return what is wrong with what is resumed."""
    at = 1 + int(point.where * num_operations)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with disk(kind=point.kind) as failing:
                _save_two(failing, folder, saving=point.saving, keeps=point.keeps, at=at)
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, EXIT_CODE):
        return f"the child ended with {code}"
    expected = (1, 2) if code == EXIT_CODE else (3,)
    return _resume(folder, expected=expected)


def _save_two(
    failing: Disk, folder: Path, *, saving: str, keeps: int, at: int | None = None
) -> int:
    """Save steps 1 to 3, the second of them hit; return how many operations that one was."""
    engine = Weights()
    ours = checkpoints(folder, engine=engine, saving=saving, keep=Keep(last=keeps))
    engine.step()
    ours.save(after(1), wait=True)
    failing.count, failing.at = 0, at
    engine.step()
    ours.save(after(2))
    # What goes on beside the save must not be in it.
    engine.step()
    ours._saver.finish()
    num_operations, failing.at = failing.count, None
    ours.conclude(after(3))
    ours.close()
    return num_operations


def _resume(folder: Path, *, expected: tuple[int, ...]) -> str | None:
    engine = Weights()
    ours = checkpoints(folder, engine=engine)
    state, _ = ours.restore()
    if state.step not in expected:
        return f"step {state.step} was resumed, not one of {expected}"
    wanted = Weights()
    for _ in range(state.step):
        wanted.step()
    for name, tensor in wanted.held.items():
        if not torch.equal(engine.held[name], tensor):
            return f"{name} is not what it was at step {state.step}"
    left = [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]
    if left:
        return f"left over: {left}"
    # And the run goes on from there.
    engine.step()
    ours.conclude(after(state.step + 1))
    ours.close()
    storage.verify(storage.list_checkpoints(folder / "checkpoints")[-1])
    return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # Each point warns of what it is there for.
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(hit_all(options.points, seed=options.seed, folder=Path(place))))
