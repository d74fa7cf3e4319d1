"""Run our own modules in fresh processes that never outlive the process that started them.

In: module names with their arguments. Out: nothing, or a RunError with the child's last words; what
children compute they leave in files. Knows nothing of what they compute.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import diptych
from diptych.core.errors import RunError

PARENT_VARIABLE = "DIPTYCH_PARENT_PID"
_POLL_S = 0.02
_WATCH_S = 0.5
_STOP_S = 5.0


def run_modules(
    commands: Sequence[Sequence[str]],
    *,
    what: str,
    num_threads: int = 1,
    limit_s: float | None = None,
) -> None:
    """Run `python -m module arguments...` for each command side by side and wait for all.

    Args:
        commands: each a module's name and its arguments.
        what: what the children do, for the error text.
        num_threads: intra-op threads of each child, so that they never oversubscribe the cores.
        limit_s: children that take longer are stopped; None waits for them.

    Raises:
        RunError: a child failed, and its last lines end the text; or the limit has passed. All
            children are stopped.
    """
    with tempfile.TemporaryDirectory(prefix="diptych-") as folder:
        logs = [Path(folder) / f"{number}.log" for number in range(len(commands))]
        children: list[subprocess.Popen[bytes]] = []
        try:
            for command, log in zip(commands, logs, strict=True):
                children.append(_start(command, log=log, num_threads=num_threads))
            _wait(children, logs=logs, what=what, limit_s=limit_s)
        finally:
            _stop(children)


def follow_parent() -> None:
    """End this process soon after the one that started it has ended, however that came about."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None:
        threading.Thread(target=_watch, args=(int(parent),), daemon=True).start()


def _start(command: Sequence[str], *, log: Path, num_threads: int) -> subprocess.Popen[bytes]:
    source = str(Path(diptych.__file__).resolve().parent.parent)
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        PARENT_VARIABLE: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _wait(
    children: Sequence[subprocess.Popen[bytes]],
    *,
    logs: Sequence[Path],
    what: str,
    limit_s: float | None,
) -> None:
    running = dict(enumerate(children))
    until_s = None if limit_s is None else time.monotonic() + limit_s
    while running:
        if until_s is not None and time.monotonic() > until_s:
            raise RunError(f"A process that had to {what} took longer than {limit_s:g} s")
        for number, child in list(running.items()):
            code = child.poll()
            if code is None:
                continue
            del running[number]
            if code != 0:
                tail = logs[number].read_text(encoding="utf-8", errors="replace").strip()
                raise RunError(
                    f"A process that had to {what} ended with code {code}",
                    cure="Its last lines:\n" + "\n".join(tail.splitlines()[-15:]),
                )
        time.sleep(_POLL_S)


def _stop(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() is None:
            child.terminate()
    deadline = time.monotonic() + _STOP_S
    for child in children:
        try:
            child.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(1)
