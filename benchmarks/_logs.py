"""Folders of long runs, as ranks leave them, written fast: lines are `StepRecord`'s own form."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from diptych.core.records import DeviceSample, NodeSample, Over, StepRecord

_PHASES = {
    "data": 0.012,
    "place": 0.004,
    "forward": 0.121,
    "backward": 0.263,
    "communication": 0.031,
    "update": 0.022,
    "checkpoint": 0.002,
    "heldout": 0.001,
    "other": 0.006,
}
_TAIL = 1.0123456789
"""What makes a drawn number of a record: no other has as many digits."""
_DRAWN = re.compile(r"\d+\.\d{9,}")
_BLOCK_STEPS = 2000


def write_runs(folder: Path, *, num_runs: int, num_steps: int, num_logs: int) -> None:
    """Write folders of runs; beyond `num_logs` a run's log is a link to one of the first."""
    for number in range(num_runs):
        run = folder / f"{number:03d}{'c804a17423f'[:9]}"
        run.mkdir(parents=True)
        _write_small(run, number=number, num_steps=num_steps)
        if number < num_logs:
            with (run / "steps.jsonl").open("wb") as file:
                for block in step_lines(num_steps, seed=number):
                    file.write(block)
        else:
            name = f"{number % num_logs:03d}{run.name[3:]}"
            os.link(folder / name / "steps.jsonl", run / "steps.jsonl")


def step_lines(num_steps: int, *, seed: int) -> Iterator[bytes]:
    """Yield the lines of a run of 8 ranks with two sources and three towers, in blocks."""
    draw = np.random.default_rng(seed)
    form, numbers = _form()
    begin_s = 1.7e9 + 1e5 * seed
    for first in range(1, num_steps + 1, _BLOCK_STEPS):
        steps = np.arange(first, min(first + _BLOCK_STEPS, num_steps + 1))
        rows = numbers * (1 + 0.1 * draw.random((len(steps), len(numbers))))
        loss = 0.4 + 2.6 * (1 + steps / 800) ** -0.6 + 0.05 * draw.standard_normal(len(steps))
        lines = [
            form.format(
                *row,
                step=step,
                loss=value,
                heldout=repr(value * 1.1) if step % 500 == 0 else "null",
                attempt=int(step > num_steps / 2),
                time_s=begin_s + 0.47 * step,
            )
            for step, value, row in zip(steps.tolist(), loss.tolist(), rows.tolist(), strict=True)
        ]
        yield "".join(lines).encode()


def _form() -> tuple[str, np.ndarray]:
    """Return a record's line with places for what is drawn, and the numbers that are drawn from."""
    line = _record().model_dump_json()
    numbers = np.array([float(each) for each in _DRAWN.findall(line)])
    line = line.replace("{", "{{").replace("}", "}}")
    for name, form in (
        ('"step":1', '"step":{step}'),
        ('"loss":2.0', '"loss":{loss!r}'),
        ('"heldout_loss":null', '"heldout_loss":{heldout}'),
        ('"attempt":0', '"attempt":{attempt}'),
        ('"time_s":1.5', '"time_s":{time_s:.3f}'),
    ):
        assert line.count(name) == 1, f"{name} is no longer in a record"
        line = line.replace(name, form)
    return _DRAWN.sub("{:.16g}", line) + "\n", numbers


def _record() -> StepRecord:
    gigabytes = {"allocated": 52, "reserved": 61, "peak": 58, "host": 9}
    return StepRecord(
        step=1,
        epoch=0,
        loss=2.0,
        lr=1e-4 * _TAIL,
        lr_by_tower={"vision": 1e-5, "language": 1e-4},
        grad_norm=0.9 * _TAIL,
        num_rows=256,
        num_samples=512,
        num_label_tokens=41000,
        num_text_tokens=90000,
        num_image_tokens=170000,
        num_patches=680000,
        padding_fraction=0.06 * _TAIL,
        step_s=0.46 * _TAIL,
        data_s=0.012 * _TAIL,
        tokens_per_s=560000 * _TAIL,
        idle_fraction=0.02 * _TAIL,
        loss_by_source={"captions": 0.7 * _TAIL, "documents": 0.5 * _TAIL},
        num_samples_by_source={"captions": 300, "documents": 212},
        num_label_tokens_by_source={"captions": 21000, "documents": 20000},
        time_s=1.5,
        phases_s={
            phase: Over(0.9 * mean_s * _TAIL, mean_s * _TAIL, 1.2 * mean_s * _TAIL, 3)
            for phase, mean_s in _PHASES.items()
        },
        grad_norm_by_tower={
            "vision": 0.3 * _TAIL,
            "connector": 0.1 * _TAIL,
            "language": 0.8 * _TAIL,
        },
        model_flops=3.1e15,
        hardware_flops=3.9e15,
        mfu=0.41 * _TAIL,
        hfu=0.52 * _TAIL,
        memory_bytes={
            name: Over(size * 1e9, size * 1.01e9, size * 1.02e9, 2)
            for name, size in gigabytes.items()
        },
        num_alloc_retries=0,
    )


def _write_small(run: Path, *, number: int, num_steps: int) -> None:
    spec = {
        "identity": {"num_steps": num_steps, "seed": number, "optimizer": {"lr": 1e-4 * number}},
        "placement": {"layout": {"dp": 8}},
    }
    (run / "run_spec.json").write_text(json.dumps(spec))
    status = {"state": "finished", "time_s": time.time()}
    (run / "status.json").write_text(json.dumps(status))
    attempts = [
        {"attempt": 0, "started_s": 1.7e9, "from_step": 0, "changes": []},
        {"attempt": 1, "started_s": 1.7e9 + 5e4, "from_step": num_steps // 2, "changes": []},
    ]
    (run / "attempts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in attempts))


def write_samples(run: Path, *, node: str, num_samples: int, num_devices: int = 8) -> None:
    """Write what was sampled of one node."""
    draw = np.random.default_rng(0)
    (run / "samples").mkdir(exist_ok=True)
    with (run / "samples" / f"{node}.jsonl").open("w") as file:
        for number in range(num_samples):
            noise = draw.random((num_devices, 3))
            devices = tuple(
                DeviceSample(
                    index=index,
                    busy_fraction=float(0.9 + 0.1 * one),
                    memory_used_bytes=int(6e10 + 1e9 * two),
                    memory_total_bytes=85_000_000_000,
                    power_w=float(600 + 80 * three),
                    clock_hz=float(1.7e9 + 2e8 * one),
                    temperature_c=float(60 + 5 * two),
                    throttle_reasons=("power",) if one > 0.98 else (),
                )
                for index, (one, two, three) in enumerate(noise)
            )
            sample = NodeSample(
                time_s=1.7e9 + 2.0 * number,
                node=node,
                attempt=0,
                devices=devices,
                num_cores=192,
                cpu_fraction=float(0.2 + 0.1 * noise[0, 0]),
                ranks_cpu_cores=float(8 + noise[0, 1]),
                loaders_cpu_cores=float(24 + 4 * noise[0, 2]),
                memory_available_bytes=int(1.5e12),
                ranks_memory_bytes=int(2e11),
                disk_read_bytes_per_s=float(8e8 * noise[1, 0]),
                network_received_bytes_per_s=float(3e9 * noise[1, 1]),
            )
            file.write(sample.model_dump_json() + "\n")
