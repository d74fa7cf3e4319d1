"""What a node's host is doing: the ids of this run's ranks in, the host's fields of a sample out.

What the system does not say is None, and is named once. Rates are those since the look before.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from diptych.core.host import usable_cores

_FIND_LOADERS_EVERY = 10
"""Looks between two searches for loader processes: each reads every process of the host."""

_NO_LOADERS = ("resource_tracker", "wandb-core", "forkserver")


class Host:
    """One host and this run's processes on it.

    Args:
        pids: of the run's ranks here. Other processes that they start are their loaders'.
        disk: a path on the disk whose free room matters.
        say: is told once of each thing that no answer came to.
        clock: seconds, of any beginning.
    """

    def __init__(
        self,
        *,
        pids: Sequence[int],
        disk: Path,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks = {pid: _process(pid) for pid in pids}
        self._loaders: dict[int, psutil.Process | None] = {}
        self._disk = disk
        self._say = say
        self._clock = clock
        self._unanswered: set[str] = set()
        self._num_looks = 0
        self._counters: dict[str, tuple[float, float]] = {}
        self._cpu_s: dict[int, float] = {}
        self._cpu_seen_s: float | None = None

    def sample(self) -> dict[str, Any]:
        """Return the host's fields of a `NodeSample`."""
        if self._num_looks % _FIND_LOADERS_EVERY == 0:
            self._ask("loader processes", self._find_loaders)
        self._num_looks += 1
        memory = self._ask("memory", psutil.virtual_memory)
        cores = self._ask("CPU time of ranks", self._busy_cores) or (None, None)
        return {
            "num_cores": self._ask("cores", usable_cores),
            "cpu_fraction": self._ask("CPU", self._cpu_fraction),
            "ranks_cpu_cores": cores[0],
            "loaders_cpu_cores": cores[1],
            "num_loaders": len(self._loaders),
            "memory_available_bytes": None if memory is None else int(memory.available),
            "memory_total_bytes": None if memory is None else int(memory.total),
            "ranks_memory_bytes": self._ask("memory of ranks", self._memory_bytes),
            "disk_free_bytes": self._ask(
                "free disk", lambda: int(shutil.disk_usage(self._disk).free)
            ),
            **self._rates(),
        }

    def _find_loaders(self) -> None:
        parents = {each.pid: each.info["ppid"] for each in psutil.process_iter(["ppid"])}
        found: set[int] = set()
        added = set(self._ranks)
        while added:
            added = {pid for pid, parent in parents.items() if parent in added} - set(self._ranks)
            added -= found
            found |= added
        known = {pid: self._loaders.get(pid) or _process(pid) for pid in found}
        self._loaders = {pid: each for pid, each in known.items() if each and _is_loader(each)}

    def _cpu_fraction(self) -> float | None:
        # The first answer of psutil is 0, of no time at all.
        fraction = psutil.cpu_percent(interval=None) / 100
        return fraction if self._num_looks > 1 else None

    def _busy_cores(self) -> tuple[float | None, float | None] | None:
        now = self._clock()
        before, before_s = self._cpu_s, self._cpu_seen_s
        processes = {**self._ranks, **self._loaders}
        self._cpu_s = {pid: used for pid, each in processes.items() if (used := _cpu_s(each)) >= 0}
        self._cpu_seen_s = now
        if before_s is None or now <= before_s:
            return None

        def cores(pids: Mapping[int, Any]) -> float | None:
            known = before.keys() & self._cpu_s.keys() & pids.keys()
            if pids and not known:
                return None
            used_s = [self._cpu_s[pid] - before[pid] for pid in known]
            return round(sum(used_s) / (now - before_s), 3)

        return cores(self._ranks), cores(self._loaders)

    def _memory_bytes(self) -> int | None:
        sizes = [_resident(each) for each in (*self._ranks.values(), *self._loaders.values())]
        known = [size for size in sizes if size is not None]
        return sum(known) if known else None

    def _rates(self) -> dict[str, float | None]:
        disk = self._ask("disk rates", psutil.disk_io_counters)
        network = self._ask("network rates", psutil.net_io_counters)
        now = self._clock()
        return {
            "disk_read_bytes_per_s": self._rate("read", disk, "read_bytes", now=now),
            "disk_write_bytes_per_s": self._rate("write", disk, "write_bytes", now=now),
            "network_sent_bytes_per_s": self._rate("sent", network, "bytes_sent", now=now),
            "network_received_bytes_per_s": self._rate("got", network, "bytes_recv", now=now),
        }

    def _rate(self, name: str, counters: Any, attribute: str, *, now: float) -> float | None:
        count = getattr(counters, attribute, None)
        if count is None:
            return None
        before = self._counters.get(name)
        self._counters[name] = (now, float(count))
        if before is None or now <= before[0] or count < before[1]:
            return None
        return round((count - before[1]) / (now - before[0]), 1)

    def _ask(self, what: str, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except Exception as error:  # a look at the host stops no training
            if what not in self._unanswered:
                self._unanswered.add(what)
                self._say(f"the host does not say {what} ({type(error).__name__}: {error})")
            return None


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _is_loader(process: psutil.Process) -> bool:
    """Whether a process that a rank started loads data: not its helpers, nor a logger's."""
    try:
        told = " ".join([process.name(), *process.cmdline()[:4]])
    except psutil.Error:
        return False
    return not any(name in told for name in _NO_LOADERS)


def _cpu_s(process: psutil.Process | None) -> float:
    """Return the seconds that a process was on a core; -1 where it has ended."""
    try:
        times = process.cpu_times() if process is not None else None
    except psutil.Error:
        return -1.0
    return -1.0 if times is None else times.user + times.system


def _resident(process: psutil.Process | None) -> int | None:
    try:
        return None if process is None else int(process.memory_info().rss)
    except psutil.Error:
        return None
