"""A child that never outlives its parent: own session, stop signals, the parent's death noticed."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

Child = subprocess.Popen[bytes]

_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def start(command: Sequence[str], *, env: Mapping[str, str], log: Path) -> Child:
    """Start a command in its own session; the kernel sends it SIGTERM when this process dies."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        return subprocess.Popen(
            list(command),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when the one that started it dies.

    Where whoever started it has asked for another signal, that holds.
    """
    with suppress(OSError, AttributeError):  # not on Linux
        libc = ctypes.CDLL(None)
        asked = ctypes.c_int()
        libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(asked))
        if not asked.value:
            libc.prctl(_PR_SET_PDEATHSIG, number)


def end(process: Child, *, grace_s: float) -> None:
    """End a child and all of its descendants: SIGTERM, a grace, SIGKILL."""
    family = descendants(process.pid)
    _signal_group(process.pid, number=signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    _signal_group(process.pid, number=signal.SIGKILL)
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def interrupt(process: Child) -> None:
    """Ask a child to end; torch elastic passes that on to its ranks."""
    with suppress(ProcessLookupError):
        process.terminate()


def descendants(pid: int) -> list[psutil.Process]:
    """List a process's descendants; torch elastic starts its ranks in sessions of their own."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


class StopSignals:
    """The stop signals that came while a child was running."""

    def __init__(self) -> None:
        self.count = 0
        self.name: str | None = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Count a signal as one request to stop."""
        self.count += 1
        self.name = signal.Signals(number).name


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Catch stop signals instead of dying of them; the former handlers come back at the end."""
    requests = StopSignals()
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return
    former = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    try:
        for number, handler in former.items():
            if handler is not signal.SIG_IGN:  # nohup asks to survive a hang-up
                signal.signal(number, requests.on_signal)
        yield requests
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def end_with_dvc() -> None:
    """Under `dvc repro`, send this process SIGTERM when dvc is gone: it dies without telling us.

    Without DVC nobody is watched: a run started with nohup lives on when its shell ends.
    """
    if "DVC_STAGE" not in os.environ:
        return
    parents = _parents_up_to_dvc()
    threading.Thread(target=_watch, args=(parents,), daemon=True).start()


def _parents_up_to_dvc() -> list[psutil.Process]:
    parents: list[psutil.Process] = []
    with suppress(psutil.Error):
        for parent in psutil.Process().parents():
            parents.append(parent)
            if any(Path(part).name in ("dvc", "dvc.exe") for part in parent.cmdline()[:4]):
                return parents
    return parents[:1]


def _watch(parents: Sequence[psutil.Process]) -> None:
    while all(parent.is_running() for parent in parents):
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


def _signal_group(pid: int, *, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
