"""A save hit at 500 points (killed, torn, out of room, in error), and what is resumed afterwards.

The points are those of `tests/train/crash_points.py`, drawn from another seed; each is a process of
its own. The goal is that every one resumes from the newest whole checkpoint, with the values that
were saved.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from run import Measured

_NUM_POINTS = 500
_ROOT = Path(__file__).parent.parent


def measure(options: argparse.Namespace) -> Measured:
    """Hit them all."""
    command = [sys.executable, "-m", "tests.train.crash_points", f"--points={_NUM_POINTS}"]
    done = subprocess.run(
        [*command, "--seed=1"], cwd=_ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    wrong = json.loads(done.stdout)
    resumed = _NUM_POINTS - len(wrong)
    return Measured(
        unit="points resumed",
        ours=resumed,
        peers={},
        ratio=resumed / _NUM_POINTS,
        goal="all resume from the newest whole checkpoint",
        met=not wrong,
        raw={"wrong": wrong},
    )
