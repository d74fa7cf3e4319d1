"""Each bound: records that show it, and next to them records that must not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from diptych.core.records import Bound, DeviceSample, Over
from diptych.monitor.diagnose.diagnose import diagnose
from diptych.monitor.diagnose.rules import RULES
from diptych.monitor.diagnose.settings import Settings

from .records import healthy, sample, step

GPU = Settings(num_ranks=2, device="cuda", num_workers=2, max_grad_norm=1.0)


def judge(records, *, samples=(), settings=GPU, **options):
    return diagnose(records, run_id="r", samples=samples, settings=settings, **options)


def bounds(records, **options):
    return [each.bound for each in judge(records, **options).findings]


def steps(num=40, *, change=lambda number, phases: None, **fields):
    records = []
    for number in range(1, num + 1):
        phases = healthy(number)
        change(number, phases)
        records.append(step(number, phases, time_s=1000.0 + number, **fields))
    return records


def samples(num=40, *, device=None, **fields):
    found = {"busy_fraction": 0.95, "clock_hz": 1.9e9, "max_clock_hz": 1.98e9, **(device or {})}
    host = {"num_cores": 16, "cpu_fraction": 0.3, "loaders_cpu_cores": 0.5, "num_loaders": 4}
    return [
        sample(1000.5 + number, DeviceSample(index=0, **found), **{**host, **fields})
        for number in range(num)
    ]


def test_a_healthy_run_is_said_to_be():
    found = judge(steps(mfu=0.4, hfu=0.4), samples=samples())
    assert found.healthy
    assert found.findings == ()
    assert found.verdict.startswith("Healthy")
    assert found.missing == ("the devices' memory (memory_bytes): fragmentation, memory",)


def wait_for_data(number, phases):
    phases["data"] = (0.4, 0.4)


def test_waiting_for_data_is_data_or_decoding_by_how_busy_loaders_are():
    records = steps(change=wait_for_data)
    [found] = judge(records, samples=samples(loaders_cpu_cores=0.4)).findings
    # Of 0.4 + 0.3 + 0.6 + 0.05 + 0.04 seconds.
    assert (found.bound, found.cost) == ("data", pytest.approx(0.4 / 1.39, abs=1e-3))
    assert bounds(records, samples=samples(loaders_cpu_cores=3.9)) == ["decode_cpu"]
    # Without samples nobody knows, and it is said.
    unknown = judge(records)
    assert [each.bound for each in unknown.findings] == ["data"]
    assert any("decode_cpu" in line for line in unknown.missing)


def test_more_processes_are_no_cure_where_all_cores_are_busy():
    busy = samples(loaders_cpu_cores=3.9, cpu_fraction=0.98)
    [found] = judge(steps(change=wait_for_data), samples=busy).findings
    assert found.bound == "decode_cpu"
    assert "train.num_workers" not in {each.setting for each in found.changes}


def test_one_rank_that_computes_longer_is_a_straggler():
    def slow(number, phases):
        phases["forward"] = (0.3, 0.7)
        phases["communication"] = (0.45, 0.05)

    [found] = judge(steps(change=slow)).findings
    assert found.bound == "straggler"
    # The other rank waits 0.4 s of 1.4 s for it.
    assert found.cost == pytest.approx(0.4 / 1.4, abs=1e-3)
    assert found.title == "Rank 1 is later than the others"


def test_one_rank_whose_batches_are_late_is_a_straggler_too():
    def slow(number, phases):
        phases["data"] = (0.01, 0.41)
        phases["communication"] = (0.45, 0.05)

    alone = GPU.model_copy(update={"num_workers": 0})
    [found] = judge(steps(change=slow), settings=alone).findings
    assert found.bound == "straggler"
    assert found.changes[0].setting == "train.num_workers"
    # Beside the steps, equally slow loaders make one rank wait, always the same.
    [found] = judge(steps(change=slow)).findings
    assert found.bound == "data"
    assert found.cost == pytest.approx(0.41 / 1.4, abs=2e-2)
    assert any("it is rank 1 in most steps" in line for line in found.evidence)


def test_a_rank_that_is_late_now_and_then_is_no_straggler():
    def slow(number, phases):
        late = number % 3 == 0
        phases["forward"] = (0.3, 0.8) if late else (0.301, 0.3)
        phases["communication"] = (0.55, 0.05) if late else (0.05, 0.051)

    # 0.5 s of every third step is 13% of the time, and nearly all of it is lost to rank 1.
    assert bounds(steps(change=slow)) == []


def take_turns(number, phases):
    late = number % 2
    phases["forward"] = (0.7, 0.3) if late else (0.3, 0.7)
    phases["communication"] = (0.05, 0.45) if late else (0.45, 0.05)


def test_ranks_that_are_late_in_turn_have_unequal_work():
    [found] = judge(steps(change=take_turns, idle_fraction=0.17)).findings
    assert found.bound == "vision_imbalance"
    # Either waits 0.4 s of 1.4 s, in every other step.
    assert found.cost == pytest.approx(0.2 / 1.4, abs=1e-3)
    assert found.changes[0].setting == "train.schedule.balance_steps"


def test_a_rank_that_is_given_more_rows_is_no_straggler():
    def slow(number, phases):
        phases["forward"] = (0.3, 0.7)
        phases["communication"] = (0.45, 0.05)

    # 1 - mean / most of 0.9 and 1.3 s.
    assert bounds(steps(change=slow, idle_fraction=0.154)) == ["vision_imbalance"]


def test_an_exchange_that_all_wait_for_is_communication():
    def slow(number, phases):
        phases["communication"] = (0.5, 0.5)

    settings = GPU.model_copy(update={"grad_sync": "every"})
    [found] = judge(steps(change=slow), settings=settings).findings
    assert found.bound == "communication"
    assert found.cost == pytest.approx(0.5 / 1.45, abs=1e-3)
    assert found.changes[0].setting == "plan.layout.grad_sync"


def test_an_exchange_that_is_short_is_none():
    def slow(number, phases):
        phases["communication"] = (0.12, 0.12)

    assert bounds(steps(change=slow)) == []


def test_checkpoints_and_held_out_losses_are_told_apart():
    def save(number, phases):
        if number % 10 == 0:
            phases["checkpoint"] = (2.0, 2.0)

    def score(number, phases):
        if number % 5 == 0:
            phases["heldout"] = (1.0, 1.0)

    [saved] = judge(steps(change=save)).findings
    assert (saved.bound, saved.steps) == ("checkpoint", ((10, 10), (20, 20), (30, 30), (40, 40)))
    [scored] = judge(steps(change=score)).findings
    assert scored.bound == "evaluation"
    # Steps 4 to 40 with 8 held-out losses: 8 of 45 s.
    assert scored.cost == pytest.approx(8 / (37 + 8), abs=1e-3)


def test_checkpoints_in_logs_without_phases_show_by_slow_steps():
    records = [step(number, step_s=2.5 if number % 10 == 0 else 1.0) for number in range(1, 61)]
    settings = GPU.model_copy(update={"checkpoint_every_steps": 10})
    found = judge(records, settings=settings)
    assert [each.bound for each in found.findings] == ["checkpoint"]
    assert found.findings[0].confidence < 0.95
    # Where checkpoints come at other steps, nobody can tell what those are.
    settings = GPU.model_copy(update={"checkpoint_every_steps": 7})
    assert bounds(records, settings=settings) == []


def test_padding_costs_its_share_of_computing():
    [found] = judge(steps(padding_fraction=0.4)).findings
    assert found.bound == "padding"
    assert found.cost == pytest.approx(0.4 * 0.9, abs=1e-3)
    assert found.changes[0].setting == "train.schedule.mode"


def test_idle_devices_are_the_hosts_fault_where_no_wait_explains_them():
    assert bounds(steps(mfu=0.2, hfu=0.2), samples=samples(device={"busy_fraction": 0.5})) == [
        "host_launch"
    ]
    # What ranks wait for is no fault of launching.
    waiting = steps(mfu=0.2, hfu=0.2, change=wait_for_data)
    assert "host_launch" not in bounds(waiting, samples=samples(device={"busy_fraction": 0.65}))


def test_busy_devices_that_reach_little_run_small_kernels():
    assert bounds(steps(mfu=0.05, hfu=0.05), samples=samples()) == ["small_kernels"]
    assert bounds(steps(mfu=0.4, hfu=0.4), samples=samples()) == []


def test_a_throttled_device_is_found_by_reason_and_clock():
    hot = {"throttle_reasons": ("sw_thermal_slowdown",), "clock_hz": 1.0e9, "max_clock_hz": 2.0e9}
    [found] = judge(steps(mfu=0.1, hfu=0.1), samples=samples(device=hot)).findings
    assert found.bound == "throttling"
    # Half the clock, of the 90% of the time that is computed.
    assert found.cost == pytest.approx(0.5 * 0.9, abs=1e-3)
    # A power cap at nearly the full clock is what a device under load shows.
    capped = {"throttle_reasons": ("sw_power_cap",), "clock_hz": 1.9e9, "max_clock_hz": 2.0e9}
    assert bounds(steps(mfu=0.4, hfu=0.4), samples=samples(device=capped)) == []


def memory(number, *, reserved, peak, retries):
    held = {
        "reserved": Over(reserved, reserved, reserved, 0),
        "peak": Over(peak, peak, peak, 0),
    }
    return {"memory_bytes": held, "num_alloc_retries": retries * number}


def test_memory_that_is_held_and_not_used_is_fragmentation():
    def records(**given):
        return [
            step(number, healthy(number), time_s=1000.0 + number, **memory(number, **given))
            for number in range(1, 41)
        ]

    [found] = judge(records(reserved=70e9, peak=40e9, retries=1)).findings
    assert (found.bound, found.changes[0].to) == ("fragmentation", "expandable_segments:True")
    # Held, unused, and nobody needs it.
    assert bounds(records(reserved=70e9, peak=40e9, retries=0)) == []
    # Used up.
    [found] = judge(records(reserved=70e9, peak=68e9, retries=1)).findings
    assert (found.bound, found.changes[0].setting) == ("memory", "plan.layout.micro_batch")


def test_a_host_without_memory_is_found():
    low = samples(memory_available_bytes=1 << 30, memory_total_bytes=64 << 30)
    [found] = judge(steps(mfu=0.4, hfu=0.4), samples=low).findings
    assert found.bound == "memory"
    assert found.changes[0].setting == "train.num_workers"


def test_what_is_not_finite_comes_first():
    records = steps(change=wait_for_data)
    for number in (10, 20):
        records[number - 1] = records[number - 1].model_copy(
            update={"loss": None, "grad_norm": None, "skipped": True}
        )
    found = judge(records).findings
    assert [each.bound for each in found] == ["nan_risk", "data"]
    assert found[0].steps == ((10, 10), (20, 20))


def test_a_search_for_the_loss_scale_is_no_nan():
    records = steps()
    for number in (1, 2, 3):
        records[number - 1] = records[number - 1].model_copy(
            update={"grad_norm": None, "skipped": True, "loss_scale": 65536.0}
        )
    assert bounds(records) == []


def losses(values):
    return [
        step(number, healthy(number), loss=loss, time_s=1000.0 + number)
        for number, loss in enumerate(values, start=1)
    ]


def test_a_loss_that_rises_and_stays_up_diverges():
    noise = [0.02 * (-1) ** number for number in range(100)]
    fall = [3.0 - 0.03 * number for number in range(60)]
    rise = [1.2 + 0.1 * number for number in range(40)]
    rising = [value + extra for value, extra in zip(fall + rise, noise, strict=True)]
    [found] = judge(losses(rising)).findings
    assert found.bound == "diverging"
    # The lowest tenth is the sixth; from the one after on it rises.
    assert found.steps == ((61, 100),)
    # One that falls on, and one bad batch.
    falling = [3.0 - 0.02 * number + extra for number, extra in enumerate(noise)]
    falling[70] = 9.0
    assert bounds(losses(falling)) == []


def test_a_loss_that_stands_still_under_clipped_gradients_is_the_rates_fault():
    still = [2.3 + 0.1 * (-1) ** number for number in range(60)]
    records = [record.model_copy(update={"grad_norm": 8.0}) for record in losses(still)]
    assert bounds(records) == ["learning_rate"]
    # At the end of a schedule the rate is small, and standing still is no fault of it.
    ended = [record.model_copy(update={"lr": 1e-3 * (1 - record.step / 61)}) for record in records]
    assert bounds(ended) == []


def test_a_window_of_steps_alone_is_judged():
    def change(number, phases):
        if number > 20:
            wait_for_data(number, phases)

    records = steps(change=change)
    assert bounds(records, steps=(1, 20)) == []
    found = judge(records, steps=(21, 40))
    assert [each.bound for each in found.findings] == ["data"]
    assert (found.first_step, found.last_step) == (21, 40)


def test_the_first_steps_of_an_attempt_do_not_count():
    def change(number, phases):
        if number in (1, 21):
            phases["data"] = (30.0, 30.0)

    records = steps(change=change)
    again = [
        record.model_copy(update={"attempt": 1}) if record.step > 20 else record
        for record in records
    ]
    assert bounds(again) == []
    assert bounds(records) == ["data"]


def test_old_logs_are_judged_by_what_they_have():
    records = [step(number, step_s=1.0, data_s=0.5) for number in range(1, 41)]
    found = judge(records)
    assert [each.bound for each in found.findings] == ["data"]
    assert found.findings[0].cost == 0.5
    assert any("straggler" in line for line in found.missing)


def test_changes_name_settings_that_there_are():
    root = Path(__file__).resolve().parents[3]
    sources = (root / "src/diptych/monitor/diagnose/rules").glob("*.py")
    named = {
        name
        for path in sources
        for name in re.findall(r'"((?:train|plan|prepare)\.[\w.]+)"', path.read_text())
    }
    assert len(named) > 25
    for name in sorted(named):
        section, *keys = name.split(".")
        found = yaml.safe_load((root / f"conf/base/parameters_{section}.yml").read_text())[section]
        for key in keys:
            assert key in found, name
            found = found[key]


def test_every_bound_has_one_rule():
    # Rules are told apart by the bound that they are named after.
    names = [rule.__name__.removeprefix("judge_") for rule in RULES]
    assert sorted(names) == sorted(get_args(Bound))
