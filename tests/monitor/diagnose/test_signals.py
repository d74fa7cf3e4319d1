"""Numbers of a window, from records whose numbers are known."""

from __future__ import annotations

import pytest

from diptych.core.records import DeviceSample
from diptych.monitor.diagnose.periods import find_period
from diptych.monitor.diagnose.signals import measure

from .records import healthy, sample, step


def test_phases_add_up_to_all_of_the_time():
    found = measure([step(number, healthy(number)) for number in range(1, 31)])
    assert found.times is not None
    assert sum(found.times.shares.values()) == pytest.approx(1.0)
    assert found.times.shares["backward"] == pytest.approx(0.6)


def test_waiting_for_a_rank_is_taken_out_of_the_exchange():
    phases = {
        "forward": (0.4, 0.4, 0.4, 0.8),
        "communication": (0.5, 0.5, 0.5, 0.1),
    }
    found = measure([step(number, phases) for number in range(1, 31)])
    assert found.times is not None
    assert found.imbalance is not None
    # Of 0.9 s the last rank spends 0.1 in the exchange itself; three wait 0.4 s, one none.
    assert found.times.exchange == pytest.approx(0.1 / 0.9)
    assert found.times.waiting == pytest.approx(0.3 / 0.9)
    assert found.times.waiting_most == pytest.approx(0.4 / 0.9)
    assert (found.imbalance.rank, found.imbalance.dominance) == (3, 1.0)
    assert found.imbalance.rank_phase == "forward"


@pytest.mark.parametrize(("every", "offset"), [(3, 0), (7, 3), (10, 9)])
def test_slow_steps_at_equal_distances_are_a_period(every, offset):
    records = [
        step(number, step_s=3.0 if number % every == offset else 1.0) for number in range(1, 61)
    ]
    found = find_period(records)
    assert found is not None
    assert (found.every_steps, found.extra_s) == (every, 2.0)
    num = sum(number % every == offset for number in range(1, 61))
    assert (found.num, found.cost) == (num, pytest.approx(2 * num / (60 + 2 * num)))


def test_slow_steps_here_and_there_are_no_period():
    slow = {3, 8, 20, 21, 39, 55}
    records = [step(number, step_s=3.0 if number in slow else 1.0) for number in range(1, 61)]
    assert find_period(records) is None


def test_samples_of_other_times_do_not_count():
    records = [step(number, healthy(number), time_s=100.0 + number) for number in range(1, 31)]
    busy = DeviceSample(index=0, busy_fraction=0.9)
    idle = DeviceSample(index=0, busy_fraction=0.0)
    seen = [sample(50.0, idle), sample(110.5, busy), sample(300.0, idle)]
    found = measure(records, samples=seen)
    assert found.devices is not None
    assert found.devices.busy == 0.9


def test_what_was_not_measured_is_missing():
    found = measure([step(number) for number in range(1, 31)])
    assert found.times is None
    assert found.imbalance is None
    assert found.devices is None
    assert found.hosts is None
    assert found.memory is None
    assert found.mfu is None
