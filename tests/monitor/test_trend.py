"""Growth is told from noise, warm-up and sawteeth; series are made here, with known slopes."""

from __future__ import annotations

import math
import random

import pytest

from diptych.monitor.trend import Trend

SEEDS = range(12)


def rises(values, **options):
    """At which values a trend is told."""
    trend = Trend(**{"least": 10.0, "window": 20, **options})
    return [number for number, value in enumerate(values) if trend.add(value)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["noise", "warm up", "sawtooth", "step"])
def test_what_does_not_grow_without_end_is_no_rise(kind, seed):
    draw = random.Random(seed)
    shapes = {
        "noise": lambda step: 1000.0,
        "warm up": lambda step: 1000.0 - 600.0 * math.exp(-step / 60),
        "sawtooth": lambda step: 1000.0 + 10.0 * (step % 35),
        "step": lambda step: 1000.0 + 300.0 * (step > 700),
    }
    values = [shapes[kind](step) * draw.gauss(1.0, 0.02) for step in range(3000)]
    assert rises(values) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_leak_is_found_under_noise(seed):
    draw = random.Random(seed)
    values = [1000.0 + 0.5 * step + 50 * abs(draw.gauss(0, 1)) for step in range(600)]
    trend = Trend(least=10.0, window=20)
    found = [trend.rise for value in values if trend.add(value)]
    assert found
    rise = found[0]
    # Seven windows lie between the floors of the first and the eighth.
    assert rise.last - rise.first == pytest.approx(0.5 * 140, rel=0.4)
    assert rise.num_values == 160


def test_a_leak_that_is_too_small_to_matter_is_no_rise():
    assert rises([1000.0 + 0.05 * step for step in range(1000)], least=10.0) == []
    assert rises([100.0 + 0.05 * step for step in range(1000)], least=100.0) == []
    assert rises([100.0 + 0.05 * step for step in range(1000)], least=1.0)
