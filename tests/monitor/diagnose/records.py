"""Step records and samples that say exactly what they are given."""

from __future__ import annotations

from diptych.core.records import DeviceSample, NodeSample, Over, StepRecord


def over(*values: float) -> Over:
    """Sum up one number of each rank."""
    most = max(values)
    return Over(min(values), sum(values) / len(values), most, values.index(most))


def step(number: int, phases: dict[str, tuple[float, ...]] | None = None, **fields) -> StepRecord:
    """Make a step of ranks that took so many seconds in each phase; those between come on top."""
    phases = phases or {}
    between = ("checkpoint", "heldout", "profile")
    inside = {name: took for name, took in phases.items() if name not in between}
    took_s = sum(map(max, zip(*inside.values(), strict=True))) if inside else 1.0
    ranks = [sum(each) for each in zip(*inside.values(), strict=True)]
    made = {
        "step": number,
        "epoch": 0,
        "loss": 2.0 - 0.005 * number,
        "lr": 1e-3,
        "grad_norm": 0.8,
        "num_rows": 32,
        "num_samples": 32,
        "num_label_tokens": 320,
        "num_text_tokens": 600,
        "num_image_tokens": 400,
        "num_patches": 1600,
        "padding_fraction": 0.02,
        "step_s": max(ranks, default=took_s),
        "data_s": max(phases.get("data", (0.0,))),
        "tokens_per_s": 1000.0,
        "phases_s": {name: over(*took) for name, took in phases.items()},
        **fields,
    }
    return StepRecord(**made)


def sample(time_s: float, *devices: DeviceSample, **fields) -> NodeSample:
    """Make a sample of a node with these devices."""
    return NodeSample(time_s=time_s, node="n0", attempt=0, devices=devices, **fields)


def healthy(number: int) -> dict[str, tuple[float, ...]]:
    """Return phases of two ranks that nothing bounds: 1 second, 0.9 of it computing."""
    return {
        "data": (0.01, 0.01),
        "forward": (0.3, 0.3),
        "backward": (0.6, 0.6),
        "communication": (0.05, 0.05),
        "update": (0.04, 0.04),
    }
