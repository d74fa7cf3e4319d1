"""Whether the diagnosis names what is wrong: runs with a fault put in, and healthy ones.

A seed draws what is wrong, how much, and the run's settings. The fault is put into a real training
of the starter model, 2 ranks on this machine, by a wrapper around the worker (`_injected.py`);
what only a GPU can show (tiny kernels, a throttled device) is judged on synthetic records
(`_simulated.py`), and every line of the raw figures says which it was. DIPTYCH_DIAGNOSE=simulated
takes synthetic records for all, which tries the rules and measures nothing.

Rules and thresholds stand before a seed is drawn: `rules_sha256` is the hash of their sources.
Thresholds were developed on seeds from 1000 on; what is scored begins with SEED (0).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from _injected import start_ranks, write
from _scenarios import EXPECTED, Scenario, draw
from _simulated import simulate
from _starter import Starter, compose_run, prepare_starter, read_parameters
from diptych.core.records import Diagnosis, RunSpec
from diptych.launch.network import loopback, python_path, rank_environment
from diptych.launch.ready import open_folder
from diptych.monitor.diagnose import diagnose as engine
from diptych.monitor.observations import read_observations
from diptych.monitor.run_folder import RunFolder
from run import Measured

NUM_FAULTY, NUM_HEALTHY = 20, 20
GOAL = "at least 19 of 20 named first, no alarm in 20 healthy runs"
_LEAST = 19
_NUM_RANKS = 2
_OPTIMIZER: dict[str, Any] = read_parameters("base")["train"]["optimizer"]

Judge = Callable[[Scenario], tuple[Diagnosis, str]]
"""Makes a scenario's run and judges it; says whether its records were `real` or `simulated`."""


def measure(options: argparse.Namespace) -> Measured:
    """Judge 20 faulty and 20 healthy runs."""
    first = options.seed or 0
    seeds = range(first, first + NUM_FAULTY)
    with tempfile.TemporaryDirectory(prefix="diptych-diagnosis-") as name:
        judge = _judge_simulated if _is_simulated() else RealRuns(Path(name)).judge
        faulty = [_score(draw(seed), judge=judge) for seed in seeds]
        healthy = [
            _score(draw(seed, is_healthy=True), judge=judge)
            for seed in range(first, first + NUM_HEALTHY)
        ]
    num_named = sum(each["right"] for each in faulty)
    num_alarms = sum(not each["right"] for each in healthy)
    lines = [*faulty, *healthy]
    return Measured(
        unit="simulated runs named right" if _is_simulated() else "runs named right",
        ours=num_named,
        peers={},
        ratio=num_named / len(faulty),
        goal=GOAL,
        # Synthetic records try the rules; they meet no goal.
        met=num_named >= _LEAST and not num_alarms and not _is_simulated(),
        raw={
            "first_seed": first,
            "rules_sha256": hash_rules(),
            "num_false_alarms": num_alarms,
            "num_real": sum(each["records"] == "real" for each in lines),
            "num_simulated": sum(each["records"] == "simulated" for each in lines),
            "faulty": faulty,
            "healthy": healthy,
        },
    )


def hash_rules() -> str:
    """Hash the sources of the diagnosis, thresholds and all."""
    folder = Path(engine.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


@dataclass
class _Calm:
    """What a healthy step of a kind of run takes on this machine, measured before."""

    step_s: float
    patches: float


class RealRuns:
    """Trainings of the starter model with faults in them, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._starter: Starter | None = None
        self._calm: dict[tuple[int, str], _Calm] = {}

    def judge(self, scenario: Scenario) -> tuple[Diagnosis, str]:
        """Train a scenario and judge its records; synthetic ones where it needs a GPU."""
        if scenario.needs_devices:
            return _judge_simulated(scenario)
        return self.train(scenario), "real"

    def train(self, scenario: Scenario) -> Diagnosis:
        """Train a scenario's run and judge it."""
        calm = self._measure(scenario)
        return read_observations(self._run(scenario, calm=calm)).diagnose()

    def _measure(self, scenario: Scenario) -> _Calm:
        """Measure a healthy step of the same rows, once, for faults are shares of it."""
        key = (scenario.global_batch, scenario.mode)
        if key not in self._calm:
            short = replace(scenario, kind="healthy", num_steps=20, seed=-1 - len(self._calm))
            folder = self._run(short, calm=_Calm(step_s=0.3, patches=1.0))
            records = RunFolder(folder).read_steps()[5:]
            self._calm[key] = _Calm(
                step_s=median(record.step_s for record in records),
                patches=median(record.num_patches for record in records),
            )
        return self._calm[key]

    def _run(self, scenario: Scenario, *, calm: _Calm) -> Path:
        if self._starter is None:
            self._starter = prepare_starter(self._folder)
        spec = _compose(self._starter, scenario)
        folder = RunFolder(Path(self._starter.folders.runs) / spec.run_id)
        folder.path.mkdir(parents=True)
        logs = open_folder(spec, folder=folder)
        micro_batches = scenario.global_batch // (_NUM_RANKS * scenario.micro_batch)
        path = folder.path.with_suffix(".json")
        write(
            path,
            kind=scenario.kind,
            strength=_strength(scenario),
            step_s=calm.step_s,
            num_steps=scenario.num_steps,
            seed=scenario.seed,
            per_step={
                "micro_batches": max(1, micro_batches),
                "images": scenario.global_batch / _NUM_RANKS,
                "patches": calm.patches,
            },
        )
        env = {
            **os.environ,
            "PYTHONPATH": python_path(),
            **loopback(),
            **rank_environment(spec, logs=logs),
        }
        start_ranks(path, folder=folder.path, logs=logs, env=env, num_ranks=_NUM_RANKS)
        return folder.path


def _strength(scenario: Scenario) -> float:
    """Return how much is lost in steps; a loader's process hides a whole step of decoding."""
    is_hidden = scenario.kind == "slow_decode" and scenario.num_workers > 0
    return scenario.strength + is_hidden


def _compose(starter: Starter, scenario: Scenario) -> RunSpec:
    """Compose the starter's run with a scenario's settings; only slow checkpoints are made."""
    is_saving = scenario.kind == "slow_disk"
    return compose_run(
        starter,
        recipe="base",
        train={
            "num_steps": scenario.num_steps,
            # So every run has a name of its own.
            "seed": scenario.seed + 1_000_000 * (scenario.kind == "healthy") + 10_000,
            "optimizer": {**_OPTIMIZER, "warmup_steps": 10},
            "num_workers": scenario.num_workers,
            "checkpoint_every_steps": 10 if is_saving else 10_000,
            "checkpoint_min_interval_s": 0.0,
            "checkpoint_saving": "sync",
            "heldout_every_steps": 0,
            "max_restarts": 0,
        },
        schedule={
            "global_batch": scenario.global_batch,
            "group": scenario.group,
            "mode": scenario.mode,
            # Batches of like rows leave nothing to deal out unequally.
            "balance_steps": 1 if scenario.kind == "vision_load" else 16,
            "max_row_tokens": 256,
        },
        layout={
            "num_processes": _NUM_RANKS,
            "engine": "ddp",
            "micro_batch": scenario.micro_batch,
        },
    )


def _judge_simulated(scenario: Scenario) -> tuple[Diagnosis, str]:
    made = simulate(scenario)
    diagnosis = engine.diagnose(
        made.records,
        run_id=f"seed-{scenario.seed}",
        samples=made.samples,
        settings=made.settings,
    )
    return diagnosis, "simulated"


def _score(scenario: Scenario, *, judge: Judge) -> dict[str, Any]:
    """Judge a scenario; says what was found and whether that is right."""
    diagnosis, records = judge(scenario)
    found = [each.bound for each in diagnosis.findings]
    wanted = EXPECTED.get(scenario.kind, ())
    right = found[:1] and found[0] in wanted if wanted else not found
    print(f"{scenario.seed} {scenario.kind} ({records}): {found or 'healthy'}", file=sys.stderr)
    return {
        **asdict(scenario),
        "records": records,
        "right": bool(right),
        "found": [
            {"bound": each.bound, "cost": each.cost, "confidence": each.confidence}
            for each in diagnosis.findings
        ],
        "missing": list(diagnosis.missing),
    }


def _is_simulated() -> bool:
    return os.environ.get("DIPTYCH_DIAGNOSE") == "simulated"
