"""Plain numbers of a window of steps: step records and nodes' samples in, `Signals` out.

A group of numbers that was not measured is None. Nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from diptych.core.records import NodeSample, Record, StepRecord
from diptych.monitor.diagnose.devices import (
    Devices,
    Hosts,
    measure_devices,
    measure_hosts,
    spread_evenly,
)
from diptych.monitor.diagnose.learning import Learning, Memory, measure_learning, measure_memory
from diptych.monitor.diagnose.measured import mean
from diptych.monitor.diagnose.periods import Period, find_period
from diptych.monitor.diagnose.settings import Settings
from diptych.monitor.diagnose.times import (
    Imbalance,
    Times,
    measure_imbalance,
    measure_times,
    typical_s,
    wait_for_batches,
    without_profiled,
)

_FIRST = 3
"""Steps of an attempt that its start makes slow: the first batch, allocations, compiling."""


class Signals(Record):
    """The numbers that rules read, of the steps from `first_step` to `last_step`.

    `step_s` is a step's median seconds, `tokens_per_s` all tokens over all seconds; `num_tokens` a
    step's mean. `data_wait` is the share of the time in which the slowest rank waited for a
    batch, `padding` that of tokens which are no sample's. `mfu` and `hfu` are means.
    `data_worst` are the steps that waited longest for data. `num_left_out` steps were profiled, and
    no times are of them; where there are no others, all `num_steps` are, and `profiled` says so.
    """

    first_step: int
    last_step: int
    num_steps: int
    num_left_out: int
    profiled: bool
    step_s: float
    num_tokens: float
    tokens_per_s: float
    data_wait: float
    data_worst: tuple[int, ...]
    padding: float
    mfu: float | None
    hfu: float | None
    times: Times | None
    imbalance: Imbalance | None
    period: Period | None
    devices: Devices | None
    hosts: Hosts | None
    memory: Memory | None
    learning: Learning


def measure(
    records: Sequence[StepRecord],
    *,
    samples: Sequence[NodeSample] = (),
    settings: Settings | None = None,
    steps: tuple[int, int] | None = None,
) -> Signals:
    """Sum up the steps of a window.

    Args:
        records: of the whole run, in order; not empty.
        samples: of its nodes; those within the window's time count.
        settings: of the run, if known.
        steps: the first and the last step that count; None takes all but the first of every
            attempt for times, and all for losses.
    """
    window = _window(records, steps=steps)
    chosen = window if steps is not None else _without_starts(window)
    timed = without_profiled(chosen)
    seen = spread_evenly(_within(samples, window=timed))
    num_tokens = sum(map(_tokens, timed))
    return Signals(
        first_step=window[0].step,
        last_step=window[-1].step,
        num_steps=len(timed),
        num_left_out=len(chosen) - len(timed),
        profiled=timed[0].profiled,
        step_s=typical_s(timed),
        num_tokens=num_tokens / len(timed),
        tokens_per_s=num_tokens / sum(record.step_s for record in timed),
        data_wait=wait_for_batches(timed),
        data_worst=_longest_waits(timed),
        padding=fmean(record.padding_fraction for record in timed),
        mfu=mean(record.mfu for record in timed),
        hfu=mean(record.hfu for record in timed),
        times=measure_times(timed),
        imbalance=measure_imbalance(timed),
        period=find_period(timed),
        devices=measure_devices(seen),
        hosts=measure_hosts(seen),
        memory=measure_memory(timed),
        learning=measure_learning(window, max_grad_norm=(settings or Settings()).max_grad_norm),
    )


def _window(records: Sequence[StepRecord], *, steps: tuple[int, int] | None) -> list[StepRecord]:
    first, last = (0, records[-1].step) if steps is None else steps
    window = [each for each in records if first <= each.step <= last]
    assert window, "a window has steps"
    return window


def _longest_waits(records: Sequence[StepRecord]) -> tuple[int, ...]:
    worst = sorted(records, key=lambda record: -record.data_s)[:5]
    return tuple(sorted(record.step for record in worst))


def _tokens(record: StepRecord) -> int:
    return record.num_text_tokens + record.num_image_tokens


def _without_starts(window: Sequence[StepRecord]) -> list[StepRecord]:
    """Leave out the first steps of every attempt, where enough others are left."""
    begins: dict[int, int] = {}
    for record in window:
        begins.setdefault(record.attempt, record.step)
    rest = [record for record in window if record.step >= begins[record.attempt] + _FIRST]
    return rest if len(rest) >= 2 * _FIRST else list(window)


def _within(samples: Sequence[NodeSample], *, window: Sequence[StepRecord]) -> list[NodeSample]:
    """Keep samples of the window's time; steps without times keep those of their attempts."""
    first, last = window[0], window[-1]
    if first.time_s is None or last.time_s is None:
        attempts = {record.attempt for record in window}
        return [sample for sample in samples if sample.attempt in attempts]
    begin_s = first.time_s - first.step_s
    return [sample for sample in samples if begin_s <= sample.time_s <= last.time_s]
