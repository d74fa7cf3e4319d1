"""Numbers of a window, from records whose numbers are known."""

from __future__ import annotations

import pytest

from diptych.core.records import DeviceSample
from diptych.monitor.diagnose.diagnose import diagnose
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
    assert found.imbalance.often == 1.0


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


def _with_profiles():
    """60 steps; of every 20 three are traced and take three times as long, the next writes 9 s."""
    records = []
    for number in range(1, 61):
        phases = healthy(number)
        place = number % 20
        if place in (10, 11, 12):
            phases = {name: (3 * a, 3 * b) for name, (a, b) in phases.items()}
        if place == 13:
            phases |= {"profile": (4.0, 9.0), "communication": (5.05, 0.05)}
        records.append(step(number, phases, profiled=place in (10, 11, 12, 13)))
    return records


def test_profiled_steps_are_left_out_of_all_times():
    records = _with_profiles()
    found = measure(records)
    usual = measure([record for record in records if not record.profiled])
    assert found.num_left_out == 12
    left = {"num_left_out", "last_step", "first_step", "learning"}
    assert found.model_dump(exclude=left) == usual.model_dump(exclude=left)
    assert (found.step_s, found.period) == (pytest.approx(1.0), None)
    # Taken for the run's own they are slow steps that come back.
    taken = measure([record.model_copy(update={"profiled": False}) for record in records])
    assert taken.tokens_per_s < 0.8 * found.tokens_per_s
    # A window of nothing else is judged as it is, and a profile's own time is nobody's.
    alone = measure(records, steps=(10, 13))
    assert (alone.num_steps, alone.num_left_out, alone.profiled) == (4, 0, True)
    assert alone.times is not None
    assert alone.times.total_s == pytest.approx(3 * 3.0 + 0.95 + 2.55)
    assert sum(alone.times.shares.values()) == pytest.approx(1.0)


def test_old_samples_that_are_far_apart_count_as_much_as_new_ones():
    records = [step(number, time_s=float(number)) for number in range(1, 14_001)]

    def device(busy):
        return DeviceSample(index=0, busy_fraction=busy)

    # A device that was idle until 12800 s, and busy for 800 s: 0.0588 of the time.
    old = [sample(64.0 * number + number % 2, device(0.0)) for number in range(200)]
    new = [sample(12_800.0 + 2 * number, device(1.0)) for number in range(400)]
    found = measure(records, samples=[*old, *new], steps=(1, 13_600))
    assert found.devices is not None
    assert found.devices.busy == pytest.approx(800 / 13_600, abs=0.005)
    # In a window of new ones alone, all count.
    part = measure(
        records, samples=[*old, *new[:-1], sample(13_598.0, device(0.0))], steps=(13_000, 13_600)
    )
    assert part.devices is not None
    assert part.devices.busy == pytest.approx(299 / 300, abs=1e-3)


def test_a_diagnosis_says_which_steps_it_left_out():
    records = _with_profiles()
    found = diagnose(records, run_id="r")
    assert "the times of 12 profiled steps, which took longer: left out" in found.missing
    alone = diagnose(records, run_id="r", steps=(10, 13))
    assert "steps without a profile: all of these took longer than the run's own" in alone.missing
    without = diagnose([record for record in records if not record.profiled], run_id="r")
    assert not any("profile" in text for text in without.missing)


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
