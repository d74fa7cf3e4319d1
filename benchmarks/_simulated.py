"""Step records and samples of a run that nobody trained: a scenario in, what was observed out.

A small model of ranks: each computes for a time that differs with its rows and with noise, waits
for the latest one, and exchanges. What a scenario does to a run is put in where it happens, and the
phases follow. Nothing here was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from _scenarios import Scenario
from diptych.core.records import DeviceSample, NodeSample, Over, Phase, StepRecord
from diptych.monitor.diagnose.settings import Settings

_GIB = 1 << 30
_OWN: tuple[Phase, ...] = ("data", "place", "forward", "backward", "update", "other")
_SAMPLE_EVERY_S = 2.0


@dataclass(frozen=True)
class Simulated:
    """What a run's folder would hold."""

    records: list[StepRecord]
    samples: list[NodeSample]
    settings: Settings


@dataclass
class _Run:
    """A run in the making; per-rank arrays are [num_ranks] seconds."""

    scenario: Scenario
    random: np.random.Generator
    has_devices: bool
    checkpoint_every: int
    heldout_every: int
    exchange: float
    uneven: float
    mfu: float
    hurt: int
    noise: float
    bias: np.ndarray
    fetching: float
    nonfinite: set[int] = field(default_factory=set)

    @property
    def num_ranks(self) -> int:
        return self.scenario.num_ranks


def simulate(scenario: Scenario) -> Simulated:
    """Make a scenario's records."""
    random = np.random.default_rng([scenario.seed, scenario.kind == "healthy"])
    run = _Run(
        scenario=scenario,
        random=random,
        has_devices=scenario.needs_devices or bool(random.random() < 0.4),
        checkpoint_every=10 if scenario.kind == "slow_disk" else 1000,
        heldout_every=int(random.choice([20, 30])),
        exchange=float(random.uniform(0.02, 0.1)),
        uneven=float(random.uniform(0.01, 0.05)),
        mfu=float(random.uniform(0.3, 0.5)),
        hurt=int(random.integers(scenario.num_ranks)),
        noise=float(random.uniform(0.02, 0.1)),
        bias=1.0 + random.uniform(0.0, 0.05, scenario.num_ranks),
        fetching=float(random.uniform(0.03, 0.1)),
    )
    if scenario.kind == "nan":
        hit = random.choice(np.arange(5, scenario.num_steps), round(scenario.strength), False)
        run.nonfinite = {int(step) for step in hit}
    records = []
    now_s = 1_000_000.0
    for step in range(1, scenario.num_steps + 1):
        record = _step(run, step=step, now_s=now_s)
        assert record.time_s is not None, "a simulated step has a time"
        now_s = record.time_s + _between(record)
        records.append(record)
    return Simulated(records, _samples(run, records=records), _settings(run))


def _settings(run: _Run) -> Settings:
    scenario = run.scenario
    return Settings(
        num_ranks=run.num_ranks,
        device="cuda" if run.has_devices else "cpu",
        micro_batch=scenario.group,
        group=scenario.group,
        global_batch=scenario.global_batch,
        mode=scenario.mode,
        num_workers=scenario.num_workers,
        checkpoint_every_steps=run.checkpoint_every,
        checkpoint_saving="sync",
        heldout_every_steps=run.heldout_every,
        max_grad_norm=1.0,
    )


def _step(run: _Run, *, step: int, now_s: float) -> StepRecord:
    random, scenario = run.random, run.scenario
    rows = np.exp(random.normal(0.0, run.uneven, run.num_ranks))
    patches = float(np.exp(random.normal(0.0, 0.1)))
    own = _own_phases(run, work=rows * patches)
    idle = 1.0 - rows.mean() / rows.max()
    if scenario.kind == "vision_load":
        idle = _load_one_rank(run, own=own)
    exchange = run.exchange * float(np.exp(random.normal(0.0, 0.1)))
    if scenario.kind == "slow_all_reduce":
        exchange += scenario.strength * float(random.uniform(0.8, 1.2))
    _hurt(run, own=own)
    busy = sum(own[name] for name in _OWN)
    own["communication"] = exchange + busy.max() - busy
    for name, took_s in _between_phases(run, step=step).items():
        own[name] = np.full(run.num_ranks, took_s)
    step_s = float(busy.max() + exchange)
    return _record(
        run,
        step=step,
        phases={name: _over(values) for name, values in own.items()},
        step_s=step_s,
        data_s=float(own["data"].max()),
        time_s=now_s + step_s,
        idle_fraction=float(idle),
        num_patches=int(1600 * patches),
    )


def _own_phases(run: _Run, *, work: np.ndarray) -> dict[Phase, np.ndarray]:
    random, num = run.random, run.num_ranks

    def took(mean_s: float) -> np.ndarray:
        return mean_s * np.exp(random.normal(0.0, run.noise, num))

    data = took(0.01) if run.scenario.num_workers else took(run.fetching)
    own: dict[Phase, np.ndarray] = {
        "data": data,
        "place": took(0.005),
        "forward": took(0.28) * work * run.bias,
        "backward": took(0.52) * work * run.bias,
        "update": took(0.05),
        "other": took(0.01),
    }
    if random.random() < 0.03:  # something else ran on a rank's core
        own["backward"][random.integers(num)] *= random.uniform(1.3, 1.8)
    if run.scenario.kind == "slow_decode":
        # Loaders are behind by a batch each, so ranks wait in every step or in bursts.
        every = max(1, run.scenario.num_workers)
        own["data"] += run.scenario.strength * random.uniform(0.7, 1.3, num) * every
    return own


def _load_one_rank(run: _Run, *, own: dict[Phase, np.ndarray]) -> float:
    """Give a rank that is drawn anew in each step most of the images; returns the idle share."""
    rank = run.random.integers(run.num_ranks)
    more = 1.0 + run.scenario.strength * run.random.uniform(0.6, 1.4)
    for name in ("forward", "backward"):
        own[name][rank] *= more
    loads = np.ones(run.num_ranks)
    loads[rank] = more
    return float(1.0 - loads.mean() / loads.max())


def _hurt(run: _Run, *, own: dict[Phase, np.ndarray]) -> None:
    """Slow down the rank that is hurt in all steps."""
    if run.scenario.kind == "straggler":
        own["forward"][run.hurt] += run.scenario.strength * run.random.uniform(0.9, 1.1)
    if run.scenario.kind == "throttled":
        for name in ("forward", "backward"):
            own[name][run.hurt] /= run.scenario.strength


def _between_phases(run: _Run, *, step: int) -> dict[Phase, float]:
    found: dict[Phase, float] = {"checkpoint": 0.0, "heldout": 0.0}
    if step % run.checkpoint_every == 0:
        found["checkpoint"] = float(run.scenario.strength * run.random.uniform(0.9, 1.1))
    if step % run.heldout_every == 0:
        found["heldout"] = float(run.random.uniform(0.2, 0.8))
    return found


def _record(run: _Run, *, step: int, phases: dict[Phase, Over], **fields: object) -> StepRecord:
    bad = step in run.nonfinite
    random, part = run.random, step / run.scenario.num_steps
    loss = 0.8 + 2.4 * math.exp(-3 * part) + float(random.normal(0, 0.05))
    is_small = run.scenario.kind == "tiny_kernels"
    reached = run.scenario.strength if is_small else run.mfu
    clock = run.scenario.strength if run.scenario.kind == "throttled" else 1.0
    return StepRecord.model_validate(
        {
            "step": step,
            "epoch": 0,
            "loss": None if bad else loss,
            "lr": 1e-3,
            "grad_norm": None if bad else float(np.exp(random.normal(0.0, 0.3))),
            "skipped": bad,
            "num_rows": run.scenario.global_batch,
            "num_samples": run.scenario.global_batch,
            "num_label_tokens": 300,
            "num_text_tokens": 700,
            "num_image_tokens": 400,
            "padding_fraction": float(random.uniform(0.0, 0.08)),
            "tokens_per_s": 1000.0,
            "phases_s": phases,
            "mfu": reached * clock if run.has_devices else None,
            "hfu": reached * clock * 1.05 if run.has_devices else None,
            **fields,
        }
    )


def _samples(run: _Run, *, records: list[StepRecord]) -> list[NodeSample]:
    """Sample the node as often as a sampler would, while steps went on."""
    first, last = records[0].time_s, records[-1].time_s
    assert first is not None, "a simulated step has a time"
    assert last is not None, "a simulated step has a time"
    return [
        _sample(run, time_s=float(time_s)) for time_s in np.arange(first, last, _SAMPLE_EVERY_S)
    ]


def _sample(run: _Run, *, time_s: float) -> NodeSample:
    random, scenario = run.random, run.scenario
    loaders = scenario.num_workers * run.num_ranks
    share = random.uniform(0.05, 0.3) if scenario.kind != "slow_decode" else 0.15
    if scenario.kind == "slow_decode" and scenario.seed % 2:  # half of them by work, not by waiting
        share = random.uniform(0.93, 1.0)
    devices = (
        tuple(_device(run, index=index) for index in range(run.num_ranks))
        if run.has_devices
        else ()
    )
    return NodeSample(
        time_s=time_s,
        node="n0",
        attempt=0,
        devices=devices,
        num_cores=64,
        cpu_fraction=float(random.uniform(0.1, 0.5)),
        ranks_cpu_cores=float(run.num_ranks),
        loaders_cpu_cores=float(share * loaders) if loaders else None,
        num_loaders=loaders or None,
        memory_available_bytes=200 * _GIB,
        memory_total_bytes=256 * _GIB,
    )


def _device(run: _Run, *, index: int) -> DeviceSample:
    random = run.random
    waits = {"slow_decode": run.scenario.strength / (1 + run.scenario.strength)}
    busy = (1.0 - waits.get(run.scenario.kind, 0.0)) * random.uniform(0.92, 1.0)
    throttled = run.scenario.kind == "throttled" and index == run.hurt
    clock = run.scenario.strength if throttled else float(random.uniform(0.94, 1.0))
    return DeviceSample(
        index=index,
        busy_fraction=float(busy),
        memory_used_bytes=int(random.uniform(0.5, 0.8) * 80 * _GIB),
        memory_total_bytes=80 * _GIB,
        power_w=float(random.uniform(450, 650)),
        clock_hz=1.98e9 * clock,
        max_clock_hz=1.98e9,
        temperature_c=91.0 if throttled else 62.0,
        throttle_reasons=("sw_thermal_slowdown",) if throttled else (),
    )


def _over(values: np.ndarray) -> Over:
    return Over(
        float(values.min()), float(values.mean()), float(values.max()), int(values.argmax())
    )


def _between(record: StepRecord) -> float:
    return sum(record.phases_s[name].most for name in ("checkpoint", "heldout"))
