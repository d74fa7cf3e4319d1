"""Which sockets a process and its descendants listen on, read from the kernel's own tables."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

import psutil

_LISTENS = "0A"


@dataclass(frozen=True, order=True)
class Listener:
    """An address that a process takes connections at."""

    address: str
    port: int


def listeners(pid: int) -> set[Listener]:
    """List what a process and its descendants listen on."""
    inodes = set()
    for process in _family(pid):
        inodes |= _sockets(process)
    return {
        listener
        for table in ("tcp", "tcp6")
        for inode, listener in _table(Path("/proc/net") / table)
        if inode in inodes
    }


def _family(pid: int) -> list[int]:
    try:
        root = psutil.Process(pid)
        return [pid, *(child.pid for child in root.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _sockets(pid: int) -> set[str]:
    found = set()
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            target = os.readlink(f"{folder}/{name}")
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        pass
    return found


def _table(path: Path) -> list[tuple[str, Listener]]:
    found = []
    for line in path.read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTENS:
            host, port = fields[1].split(":")
            found.append((fields[9], Listener(_address(host), int(port, 16))))
    return found


def _address(digits: str) -> str:
    """Spell an address that the kernel prints as little-endian words."""
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    data = b"".join(struct.pack("<I", word) for word in words)
    family = socket.AF_INET if len(data) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, data).removeprefix("::ffff:")
