"""Samples of a node while its ranks train: a thread that asks devices and host, line by line.

Nothing that goes wrong here stops a rank: what fails is said once in the log, and is missing.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diptych.core.nvml import open_nvml
from diptych.core.records import NodeSample
from diptych.monitor.devices import Devices
from diptych.monitor.host import Host
from diptych.monitor.thin import thin

_LOG = logging.getLogger(__name__)
_CLOSE_S = 2.0
_DIGITS = 6
_MOST_BYTES = 24 << 20
_NEWEST_BYTES = 12 << 20
_OLDER_BYTES = 6 << 20
"""A node's file holds no more than the first; then it is thinned to the sum of the others."""


def sample_path(folder: Path, *, node: str) -> Path:
    """Return where a node's samples lie; its name cannot lead out of the folder."""
    return folder / (re.sub(r"[^A-Za-z0-9_.-]", "_", node).lstrip(".") + ".jsonl")


def device_entry(variable: str | None, *, index: int) -> str | None:
    """Return a rank's device as CUDA_VISIBLE_DEVICES names it; None where that has not so many.

    Args:
        variable: the environment's CUDA_VISIBLE_DEVICES.
        index: the device's among those that CUDA shows.
    """
    if variable is None:
        return str(index)
    entries = [entry.strip() for entry in variable.split(",")]
    return entries[index] if index < len(entries) else None


class SampleLog:
    """Appends samples to a node's file, and thins out old ones where it has grown too large.

    What the disk has no room for is dropped, and counted.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._torn = _ends_torn(path)
        self._num_bytes = path.stat().st_size
        self._most_bytes = _MOST_BYTES
        self.num_dropped = 0

    def write(self, sample: NodeSample) -> None:
        """Append one sample as a line; what is None is left out."""
        fields = sample.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        line = json.dumps(_rounded(fields), separators=(",", ":")).encode() + b"\n"
        # What a full disk took of a line before is closed off, so that the next one is whole.
        data = b"\n" + line if self._torn else line
        try:
            self._torn = self._file.write(data) < len(data)
        except OSError as error:
            self._drop(str(error))
            return
        if self._torn:
            self._drop("no room for a whole line")
        self._num_bytes += len(data)
        if self._num_bytes > self._most_bytes and not self._torn:
            self._thin()

    def _thin(self) -> None:
        """Make room; where that fails it is tried again once the file has grown as much anew."""
        try:
            thin(self._path, newest_bytes=_NEWEST_BYTES, older_bytes=_OLDER_BYTES)
            file = self._path.open("ab", buffering=0)
        except OSError as error:
            _LOG.warning("old samples of this node are not thinned out: %s", error)
            self._most_bytes = self._num_bytes + _NEWEST_BYTES
            return
        self._file.close()
        self._file, self._most_bytes = file, _MOST_BYTES
        self._num_bytes = self._path.stat().st_size

    def close(self) -> None:
        """Close the file, and say how many lines are missing in it."""
        self._file.close()
        if self.num_dropped:
            _LOG.warning("%d samples of this node were not written", self.num_dropped)

    def _drop(self, why: str) -> None:
        if not self.num_dropped:
            _LOG.warning("samples of this node are dropped: %s", why)
        self.num_dropped += 1


class Sampler:
    """A thread that samples this node every so many seconds, until it is closed.

    Args:
        log: where samples go.
        look: takes a sample.
        every_s: seconds between two.
    """

    def __init__(self, log: SampleLog, *, look: Callable[[], NodeSample], every_s: float) -> None:
        self._log = log
        self._look = look
        self._every_s = every_s
        self._ended = threading.Event()
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; one that hangs in a driver is left behind."""
        self._ended.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._ended.wait(max(0.0, due_s - time.monotonic())):
            # A look that took longer than the interval is followed by no others in its place.
            due_s = max(due_s + self._every_s, time.monotonic())
            try:
                self._log.write(self._look())
            except Exception as error:  # nothing here stops a rank
                told = f"{type(error).__name__}: {error}"
                if told not in self._said and len(self._said) < 10:
                    self._said.add(told)
                    _LOG.warning("a sample of this node failed: %s", told)
        self._log.close()


def start_sampler(
    folder: Path,
    *,
    node: str,
    attempt: int,
    every_s: float,
    pids: Sequence[int],
    devices: Sequence[str],
) -> Sampler | None:
    """Start to sample this node; None where that is not possible, which is said.

    Args:
        folder: the run's folder of samples.
        node: this node's name.
        attempt: the run's.
        every_s: seconds between two samples.
        pids: of the run's ranks on this node.
        devices: those of the ranks, see `device_entry`; none for ranks on the CPU.
    """
    try:
        log = SampleLog(sample_path(folder, node=node))
        host = Host(pids=pids, disk=folder, say=_say)
        asked = _open_devices(devices)
    except Exception as error:  # nothing here stops a rank
        _LOG.warning("this node is not sampled: %s: %s", type(error).__name__, error)
        return None

    def look() -> NodeSample:
        return NodeSample(
            time_s=round(time.time(), 3),
            node=node,
            attempt=attempt,
            devices=asked.sample() if asked is not None else (),
            **host.sample(),
        )

    return Sampler(log, look=look, every_s=every_s)


def _open_devices(entries: Sequence[str]) -> Devices | None:
    if not entries:
        return None
    try:
        nvml = open_nvml()
    except Exception as error:  # no such package, or another vendor's driver
        nvml = None
        _say(f"NVML cannot be opened ({type(error).__name__}: {error})")
    if nvml is None:
        _say("NVML shows no device, so samples have none")
        return None
    return Devices(nvml, entries=entries, say=_say)


def _say(text: str) -> None:
    _LOG.info("samples: %s", text)


def _ends_torn(path: Path) -> bool:
    """Whether a file ends within a line, as one of a rank that was killed may."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return size > 0 and file.read(1) != b"\n"


def _rounded(value: Any) -> Any:
    """Keep as many digits of floats as were measured; times keep milliseconds."""
    if isinstance(value, float):
        return value if abs(value) > 1e6 else round(value, _DIGITS)
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return value
