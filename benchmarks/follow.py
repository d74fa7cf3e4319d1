"""What following many ranks' logs costs the driver: `LogTail` and `Warnings` beside `tail -F`.

A child plays 64 ranks: each writes 20 lines a second into a log of its own, some of them warnings
that all write, one rank now and then one of its own. Followers run at the same time on the same
files, each in a process of its own whose CPU seconds and memory the kernel counts: ours as the
driver runs it, `tail -F`, and a reader that reads every file whole once a second.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from run import Measured

NUM_RANKS, LINES_PER_S, SECONDS, ROUNDS = 64, 20, 30.0, 2
GOAL = "CPU seconds of a wall second < 0.02"

WRITER = """
import sys, time
folder, num_ranks, per_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
seconds = float(sys.argv[4])
files = [open(f"{folder}/rank-{rank:05d}.log", "ab", buffering=0) for rank in range(num_ranks)]
begin, tick = time.monotonic(), 0
while time.monotonic() - begin < seconds:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S,000")
    for rank, file in enumerate(files):
        line = f"{stamp} INFO diptych.worker step {tick} of rank {rank} " + "x" * 60
        lines = [line] * (per_s // 5)
        if tick % 25 == 0:
            lines.append(f"{stamp} WARNING diptych.train step {tick}: masked a sample")
        if tick % 10 == 0 and rank == tick % num_ranks:
            lines.append(f"{stamp} ERROR diptych.data rank {rank} read a damaged image at {tick}")
        file.write(("\\n".join(lines) + "\\n").encode())
    tick += 1
    time.sleep(max(0.0, begin + tick / 5 - time.monotonic()))
"""

OURS = """
import sys, time
from pathlib import Path
from diptych.monitor.log_tail import LogTail, Warnings
tail = LogTail(Path(sys.argv[1]))
warnings = Warnings(tail)
print("ready", flush=True)
while True:
    for line in warnings.read():
        print(line, flush=True)
    time.sleep(1.0)
"""

NAIVE = """
import sys, time
from pathlib import Path
said = set()
print("ready", flush=True)
while True:
    for path in sorted(Path(sys.argv[1]).glob("rank-*.log")):
        for line in path.read_text().splitlines():
            if ("WARNING" in line or "ERROR" in line) and line not in said:
                said.add(line)
                print(path.name, line, flush=True)
    time.sleep(1.0)
"""


def measure(options: argparse.Namespace) -> Measured:
    """Follow the same logs in all ways at once, some rounds."""
    rounds = [_round() for _ in range(ROUNDS)]
    names = [name for name in rounds[0] if name != "wrote"]
    cpu = {name: sorted(each[name]["cpu"] for each in rounds)[ROUNDS // 2] for name in names}
    return Measured(
        unit="CPU seconds of a wall second",
        ours=cpu["ours"],
        peers={name: value for name, value in cpu.items() if name != "ours"},
        ratio=cpu["ours"],
        goal=GOAL,
        met=cpu["ours"] < 0.02,
        raw={"rounds": rounds},
    )


def _round() -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="diptych-follow-") as name:
        folder = Path(name)
        for rank in range(NUM_RANKS):
            (folder / f"rank-{rank:05d}.log").touch()
        logs = [str(path) for path in sorted(folder.glob("rank-*.log"))]
        followers = {
            "ours": _start([sys.executable, "-c", OURS, name], folder / "ours.out"),
            "naive": _start([sys.executable, "-c", NAIVE, name], folder / "naive.out"),
        }
        if shutil.which("tail"):
            followers["tail -F"] = _start(["tail", "-F", "-q", *logs], folder / "tail.out")
        try:
            return _watch(followers, folder=folder)
        finally:
            for follower in followers.values():
                follower.kill()
                follower.wait()


def _watch(
    followers: dict[str, subprocess.Popen[bytes]], *, folder: Path
) -> dict[str, dict[str, float]]:
    time.sleep(2.0)  # they have begun
    before = {name: _usage(follower.pid) for name, follower in followers.items()}
    begin = time.monotonic()
    numbers = [str(folder), str(NUM_RANKS), str(LINES_PER_S), str(SECONDS)]
    subprocess.run([sys.executable, "-c", WRITER, *numbers], check=True)
    time.sleep(3.0)
    wall_s = time.monotonic() - begin
    found = {}
    for name, follower in followers.items():
        cpu_s, rss = _usage(follower.pid)
        found[name] = {
            "cpu": (cpu_s - before[name][0]) / wall_s,
            "memory_bytes": rss - before[name][1],
            "lines": len((folder / f"{name.split()[0]}.out").read_bytes().splitlines()),
        }
    wrote = sum(path.stat().st_size for path in folder.glob("rank-*.log"))
    return {**found, "wrote": {"bytes": wrote, "wall_s": wall_s}}


def _start(command: list[str], out: Path) -> subprocess.Popen[bytes]:
    with out.open("wb") as file:
        return subprocess.Popen(command, stdout=file, env=dict(os.environ))


def _usage(pid: int) -> tuple[float, int]:
    process = psutil.Process(pid)
    times = process.cpu_times()
    return times.user + times.system, process.memory_info().rss


if __name__ == "__main__":
    print(json.dumps(_round(), indent=1))
