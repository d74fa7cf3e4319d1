"""Run the benchmarks: `python benchmarks/run.py [NAME]`, all of them without a name.

Each benchmark is a module beside this file with `measure(options) -> Measured`; it runs its peers
itself, interleaved. One JSON line per benchmark goes to standard output, the raw figures to
`benchmarks/results/<name>.json`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Measured:
    """What one benchmark found.

    Attributes:
        unit: of `ours` and `peers`.
        ours: the median over all rounds.
        peers: each peer's median over all rounds.
        ratio: what the goal is about.
        goal: the ratio that is to be reached.
        met: whether it was.
        raw: every figure behind the medians.
    """

    unit: str
    ours: float
    peers: dict[str, float]
    ratio: float
    goal: str
    met: bool
    raw: dict[str, Any] = field(default_factory=dict)


def main(arguments: list[str] | None = None) -> None:
    """Run one benchmark or all."""
    names = sorted(path.stem for path in FOLDER.glob("*.py") if path != Path(__file__).absolute())
    names = [name for name in names if not name.startswith("_") and name != "run"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", choices=names, help="all if not given")
    parser.add_argument("--lengths", type=Path, help="a CSV of sample lengths, for `pack`")
    parser.add_argument("--seed", type=int, help="the first seed, for `diagnosis`")
    options = parser.parse_args(arguments)
    for name in [options.name] if options.name else names:
        report(name, measured=importlib.import_module(name).measure(options))


def report(name: str, *, measured: Measured) -> None:
    """Print a benchmark's line and keep its raw figures."""
    line = {
        "name": name,
        "unit": measured.unit,
        "ours": round(measured.ours, 4),
        "peers": {peer: round(value, 4) for peer, value in measured.peers.items()},
        "ratio": round(measured.ratio, 4),
        "goal": measured.goal,
        "met": measured.met,
        "machine": describe_machine(),
    }
    path = FOLDER / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**line, "raw": measured.raw}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(line), flush=True)


def describe_machine() -> dict[str, Any]:
    """Say what the figures were measured on."""
    import torch

    names = [
        line.partition(":")[2].strip()
        for line in _read("/proc/cpuinfo").splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
        "load": [round(load, 2) for load in os.getloadavg()],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


if __name__ == "__main__":
    # A benchmark imports this file as `run`, where `Measured` must be the same class.
    sys.modules["run"] = sys.modules["__main__"]
    main()
