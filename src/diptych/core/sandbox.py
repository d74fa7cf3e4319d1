"""Confine a process that has to read what nobody trusts.

A parent starts a module of ours with nothing of its own environment (`run_confined`); the module
gives up, as its first act and for good, what it does not need (`confine`): the network, writing
anywhere but to one folder, running programs, memory and time without end. Linux alone; what the
machine does not permit is said.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import diptych
from diptych.core.errors import RunError

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_DIE_WITH_PARENT, _NO_NEW_PRIVILEGES = 1, 38
# Landlock's system calls, and its rights by bit: Documentation/userspace-api/landlock.rst.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _BENEATH = 1, 1
_EXECUTE, _WRITE_FILE = 1 << 0, 1 << 1
_WRITES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
"""Writing, removing, and making of whatever kind."""
_MOVE, _TRUNCATE = 1 << 13, 1 << 14
_TCP = 0b11


@dataclass(frozen=True)
class Confined:
    """What a process has given up, in words; `open` is what the machine did not let it."""

    held: tuple[str, ...]
    open: tuple[str, ...]


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def confine(folder: Path, *, memory_bytes: int, cpu_s: int) -> Confined:
    """Give up what reading files needs not; call it before any thread is started.

    Args:
        folder: the only one that can be written to from now on.
        memory_bytes: of addresses, mapped files among them.
        cpu_s: seconds of computing, after which the kernel ends the process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    held, left = [], []
    has_no_network = libc.unshare(_NEW_NET) == 0 or libc.unshare(_NEW_USER | _NEW_NET) == 0
    version = int(libc.syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG))
    if version > 0 and _restrict_files(libc, folder=folder, version=version):
        held.append("writes into one temporary folder, runs no program")
    else:
        left.append("may write where you may (this kernel has no Landlock)")
    if has_no_network:
        held.append("has no network")
    elif version >= 4:
        held.append("makes no TCP connection (it may not leave the network's namespace)")
    else:
        left.append("can reach the network (this machine permits no namespace of its own)")
    for what, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    held.append(f"has {memory_bytes / 2**30:.0f} GiB of memory and {cpu_s} s")
    return Confined(held=tuple(held), open=tuple(left))


def run_confined(command: Sequence[str], *, folder: Path, what: str, limit_s: float) -> None:
    """Run `python -m module arguments...` with an empty environment, and wait for it.

    Args:
        command: a module's name and its arguments; the module calls `confine`.
        folder: its working directory, home, and place for temporary files.
        what: what it does, for the error's text.
        limit_s: seconds by the clock, after which it is killed.

    Raises:
        RunError: it failed or took too long; ends with its last lines.
    """
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            [sys.executable, "-P", "-B", "-m", *command],
            env=_environment(folder),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(timeout=limit_s)
            why = f"ended with code {code}"
        except subprocess.TimeoutExpired:
            code, why = -1, f"took longer than {limit_s:.0f} s"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        log.seek(0)
        tail = log.read().decode("utf-8", errors="replace").strip().splitlines()[-8:]
    if code:
        raise RunError(
            f"The confined process that had to {what} {why}",
            cure="Its last lines:\n" + "\n".join(tail),
        )


def _environment(folder: Path) -> dict[str, str]:
    """Return all that the child gets to know: no key, token or address of its parent's."""
    return {
        "PATH": os.defpath,
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "PYTHONPATH": str(Path(diptych.__file__).resolve().parent.parent),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _restrict_files(libc: ctypes.CDLL, *, folder: Path, version: int) -> bool:
    """Have the kernel refuse writes outside of a folder, and all programs."""
    writes = _WRITES | (_MOVE if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    rules = _Ruleset(files=writes | _EXECUTE, network=_TCP if version >= 4 else 0)
    size = ctypes.sizeof(rules) if version >= 4 else 8
    ruleset = int(libc.syscall(_CREATE_RULESET, ctypes.byref(rules), size, 0))
    if ruleset < 0:
        return False
    try:
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        rule = _Beneath(allowed=writes, folder=descriptor)
        added = libc.syscall(_ADD_RULE, ruleset, _BENEATH, ctypes.byref(rule), 0) == 0
        os.close(descriptor)
        libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        return added and libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0
    finally:
        os.close(ruleset)
