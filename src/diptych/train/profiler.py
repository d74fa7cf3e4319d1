"""torch's profiler over a few steps of a run: asked for by a file or due by setting; a trace out.

All ranks profile the same steps, each into a file of its own, in the form that Chrome's tracing,
Perfetto and TensorBoard read. A trace is whole or absent. Memory is written as JSON: torch's own
snapshot is a pickle.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from diptych.core.files import write_text
from diptych.core.records import ProfileSpec
from diptych.parallel.mesh import World
from diptych.parallel.phases import Phases

_LOG = logging.getLogger(__name__)


class Profiler:
    """Begins, goes on and ends as steps go by.

    Args:
        traces: the folder that gets a folder for each profile.
        spec: when, and how many steps.
        phases: told to mark phases in the trace while one is made.
        world: this rank's place.
    """

    def __init__(self, traces: Path, *, spec: ProfileSpec, phases: Phases, world: World) -> None:
        self._traces = traces
        self._spec = spec
        self._phases = phases
        self._world = world
        self._profile: profile | None = None
        self._num_left = 0
        self._folder = traces

    def __call__(self, step: int, asked: int) -> bool:
        """Go on to the next step; every rank calls it with the same numbers.

        Args:
            step: the one that is just done, counted from 1.
            asked: how many steps are asked for; 0 none.

        Returns:
            Whether the next step is profiled, or the first after a profile: ranks write their
            traces in unequal time, so in that one they wait for each other.
        """
        if self._profile is not None:
            with self._phases.of("profile"):
                self._profile.step()
                self._num_left -= 1
                if not self._num_left:
                    self._end()
            return True
        every = self._spec.every_steps
        number = asked or (self._spec.num_steps if every and step and not step % every else 0)
        if not number:
            return False
        with self._phases.of("profile"):
            self._begin(step, number=number)
        return True

    def close(self) -> None:
        """End what goes on, without a trace."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
            self._phases.marks = False

    def _begin(self, step: int, *, number: int) -> None:
        # The next step warms up.
        self._folder = self._traces / f"step-{step + 2:08d}"
        activities = [ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            if self._spec.memory:
                torch.cuda.memory._record_memory_history()
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=number, repeat=1),
            profile_memory=self._spec.memory,
            acc_events=True,
        )
        self._num_left = number + 1
        self._phases.marks = True
        self._profile.start()

    def _end(self) -> None:
        found, self._profile = self._profile, None
        assert found is not None, "it has begun"
        self._phases.marks = False
        try:
            found.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write("rank-{:05d}.json.gz", write=found.export_chrome_trace)
            if self._spec.memory and self._world.device.type == "cuda":
                self._write("memory-{:05d}.json", write=_write_memory)
        except (OSError, RuntimeError) as error:
            _LOG.warning("no trace was written to %s: %s", self._folder, error)
            return
        if self._world.is_first:
            _LOG.info("a trace of each rank is in %s", self._folder)

    def _write(self, name: str, *, write: Callable[[str], object]) -> None:
        path = self._folder / name.format(self._world.rank)
        partly = path.with_name(f".{path.name}")
        write(str(partly))
        os.replace(partly, path)


def _write_memory(path: str) -> None:
    """Write what the device's memory is used for, and stop keeping its history."""
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    write_text(Path(path), text=json.dumps(snapshot, default=str))


class ProfileRequest:
    """Looks for the file `profile` in a run's folder: how many steps somebody asks for.

    The file goes once it has been read, whatever is in it.
    """

    def __init__(self, path: Path, *, world: World) -> None:
        self._path = path if world.is_first else None

    def __call__(self) -> int:
        """Return how many steps are asked for; 0 where nobody asks, and on other ranks."""
        if self._path is None or not self._path.exists():
            return 0
        try:
            number = int(json.loads(self._path.read_text("utf-8"))["steps"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            _LOG.warning("%s asks for no number of steps (%s)", self._path, error)
            number = 0
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            _LOG.warning("%s stays: %s", self._path, error)
            self._path = None
        return max(0, min(number, MOST_STEPS))


MOST_STEPS = 50
"""Traces of more are too large to look at."""
