"""What was planned beside what was measured, in numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.core.records import DeviceSample, Layout, NodeSample, Over, Prediction
from diptych.report.against import memory_curve, memory_rows, say_memory, say_time, time_row
from diptych.report.steps import Steps, read_steps

from .conftest import LAYOUT, Finished

GPU = Layout(dp=2, device="cuda", precision="bf16")
GB = 1_000_000_000


def _prediction(layout: Layout, **changes: object) -> Prediction:
    fields = {"layout": layout, "held_bytes": GB, "peak_bytes": 11 * GB, "step_s": 0.2}
    return Prediction.model_validate(fields | changes)


def test_a_cpu_s_ranks_are_compared_by_their_processes(finished: Finished) -> None:
    steps = read_steps(Path(finished.run.folder))
    sample = NodeSample(time_s=1.0, node="a", attempt=0, ranks_memory_bytes=320 << 20)
    rows = memory_rows(finished.plan.predictions[0], layout=LAYOUT, steps=steps, samples=[sample])
    assert [(row.predicted, row.measured) for row in rows] == [
        (190 << 20, 152 << 20),
        (None, 320 << 20),
    ]
    assert rows[0].difference == pytest.approx(-0.2)
    assert rows[1].difference is None
    assert say_memory(rows, refused=False) == (
        "Memory of a rank reached 152.0 MiB, 20% less than the 190.0 MiB of the plan."
    )
    planned, measured = {}, {}
    for trace in memory_curve(steps, layout=LAYOUT, rows=rows).data:
        (planned if trace.name == "planned" else measured)[trace.name] = trace.y
    assert set(measured["host"]) == {152 / 1024}
    assert set(planned["planned"]) == {190 / 1024}


def test_a_gpu_s_tensors_are_compared_without_the_context(finished: Finished) -> None:
    memory = {
        "peak": Over(9 * GB, 9.2 * GB, 9.5 * GB, 1),
        "reserved": Over(10 * GB, 10 * GB, 10 * GB, 0),
        "host": Over(3 * GB, 3 * GB, 3 * GB, 0),
    }
    record = read_steps(Path(finished.run.folder)).records[0]
    steps = Steps((record.model_copy(update={"memory_bytes": memory}),))
    devices = tuple(
        DeviceSample(index=i, memory_used_bytes=used) for i, used in ((0, None), (1, 11 * GB))
    )
    samples = [NodeSample(time_s=1.0, node="a", attempt=0, devices=devices)]
    rows = memory_rows(_prediction(GPU), layout=GPU, steps=steps, samples=samples)
    # 1.5 GB of what is planned is the context and the communicator's.
    assert [(row.predicted, row.measured) for row in rows] == [
        (9.5 * GB, 9.5 * GB),
        (None, 10 * GB),
        (11 * GB, 11 * GB),
    ]
    assert "the same as the" in say_memory(rows, refused=False)
    offloaded = memory_rows(
        _prediction(GPU, host_bytes=2 * GB), layout=GPU, steps=steps, samples=samples
    )
    assert (offloaded[3].predicted, offloaded[3].measured) == (2.85 * GB, 3 * GB)


def test_what_was_not_measured_or_planned_is_said(finished: Finished) -> None:
    bare = memory_rows(_prediction(LAYOUT), layout=LAYOUT, steps=Steps(()), samples=[])
    assert all(row.measured is None and row.difference is None for row in bare)
    assert say_memory(bare, refused=False) == "Memory was not measured; the plan had 10.2 GiB."
    assert not memory_curve(Steps(()), layout=LAYOUT, rows=bare).data
    steps = read_steps(Path(finished.run.folder))
    rows = memory_rows(None, layout=LAYOUT, steps=steps, samples=[])
    assert "the plan did not consider this layout" in say_memory(rows, refused=False)
    assert say_time(time_row(None, steps=Steps(()))) == "The time of a step was not measured."


@pytest.mark.parametrize(
    ("predicted", "said"),
    [
        (0.2, "2.0 times the least that the plan thinks possible"),
        (0.5, "less than the 0.500 s that the plan held to be the least"),
        (None, "the plan predicted none"),
    ],
)
def test_a_step_s_time_is_held_against_a_floor(
    predicted: float | None, said: str, finished: Finished
) -> None:
    records = read_steps(Path(finished.run.folder)).records
    steps = Steps(tuple(each.model_copy(update={"step_s": 0.4}) for each in records))
    row = time_row(_prediction(LAYOUT, step_s=predicted), steps=steps)
    assert said in say_time(row)
