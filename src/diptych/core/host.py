"""This host: its name, and what of it the process may use, as affinity and control groups allow."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
NODE_VARIABLE = "DIPTYCH_NODE"
"""Holds a node's name for its ranks, where whoever starts them has given it one."""


def node_name() -> str:
    """Return this node's name, as whoever started the process has it."""
    names = (os.environ.get(NODE_VARIABLE), os.environ.get("SLURMD_NODENAME"))
    return next((name for name in names if name), None) or socket.gethostname()


def usable_cores(root: Path = CGROUPS) -> int:
    """Count the cores that this process may use: affinity, cut by the control group's quota."""
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = psutil.cpu_count() or 1
    for folder in _cgroup_folders(root):
        quota = _read_quota(folder)
        if quota is not None:
            # A share of a core still runs one process.
            num_cores = min(num_cores, max(1, int(quota)))
    return num_cores


def usable_memory_bytes(root: Path = CGROUPS) -> int:
    """Return the host's memory in bytes, cut by the control group's limit."""
    limits = [psutil.virtual_memory().total]
    for folder in _cgroup_folders(root):
        for name in ("memory.max", "memory/memory.limit_in_bytes", "memory.limit_in_bytes"):
            text = read_text(folder / name)
            if text and text.isdigit():
                limits.append(int(text))
    return min(limits)


def room_bytes(*, num_processes: int) -> int:
    """Return how much more of the host's memory this process may take, if others take as much.

    Args:
        num_processes: of this host that do what this one does; each has an equal part.
    """
    part = usable_memory_bytes() // num_processes - psutil.Process().memory_info().rss
    return max(0, min(psutil.virtual_memory().available // num_processes, part))


def _cgroup_folders(root: Path) -> list[Path]:
    """List the control groups that bind this process, from its own up to the root."""
    folders = [root, root / "cpu", root / "memory"]
    for line in (read_text(Path("/proc/self/cgroup")) or "").splitlines():
        controllers, _, path = line.split(":", 1)[1].partition(":")
        base = root / controllers if controllers else root
        parts = [part for part in path.split("/") if part not in ("", "..")]
        folders += [base.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _read_quota(folder: Path) -> float | None:
    """Return the cores that a control group's quota allows, None where it has none."""
    text = read_text(folder / "cpu.max")
    if text:
        quota, _, period = text.partition(" ")
        return float(quota) / float(period or 100_000) if quota.isdigit() else None
    quota, period = read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")
    if quota and period and int(quota) > 0:
        return int(quota) / int(period)
    return None


def read_text(path: Path) -> str | None:
    """Read a small file; None where there is none to read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
