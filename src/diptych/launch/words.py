"""What failed ranks said last: a folder of logs in, a few lines for people out."""

from __future__ import annotations

import re
import signal
from pathlib import Path

_ENDED = re.compile(r"exitcode\s*: (-?\d+).*?(?:\((SIG\w+)\))?$", flags=re.MULTILINE)


def rank_log(logs: Path, *, rank: int) -> Path:
    """Return the path of a rank's log: all that it prints, of every start after another."""
    return logs / f"rank-{rank:05d}.log"


def how_ended(code: int) -> str:
    """Say how a process ended, by its exit code as `subprocess` has it."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def last_words(logs: Path, *, num_lines: int = 12) -> str:
    """Say which rank failed first and how: its signal or exit code, and its traceback if any."""
    launcher = _read(*sorted(logs.glob("launcher*.log")))
    cause = launcher.rpartition("Root Cause")[2]
    rank = re.search(r"rank\s*: (\d+)", cause)
    ended = _ENDED.search(cause)
    if rank is None or ended is None:
        return "\n".join(launcher.strip().splitlines()[-num_lines:])
    how = f"was killed by {ended[2]}" if ended[2] else f"ended with exit code {ended[1]}"
    return "\n".join([f"Rank {rank[1]} {how} first.", *_traceback(logs, rank=int(rank[1]))])


def _traceback(logs: Path, *, rank: int, num_lines: int = 12) -> list[str]:
    """Return the end of a rank's last traceback, from its log or from before it had one."""
    early = sorted(logs.glob(f"**/attempt_*/{rank}/stderr.log"))[-1:]
    for path in (rank_log(logs, rank=rank), *early):
        _, found, traceback = _read(path).rpartition("Traceback (most recent call last):")
        if found:
            return traceback.strip().splitlines()[-num_lines:]
    return []


def _read(*paths: Path) -> str:
    return "".join(path.read_text("utf-8", errors="replace") for path in paths if path.exists())
