"""In: a plan's prediction, step records, nodes' samples. Out: what was planned beside what was.

A quantity that nobody measured, or that the plan says nothing of, is None; nothing is filled in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from diptych.core.records import Layout, NodeSample, Prediction, StepRecord
from diptych.core.units import format_bytes
from diptych.plan.memory import PROCESS_BYTES
from diptych.report.figures import HELDOUT, MAX_POINTS, MODEL, PALETTE, blank
from diptych.report.steps import Steps, thin

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MemoryKind = Literal["allocated", "reserved", "peak", "host"]

_GIB = 2.0**30


@dataclass(frozen=True)
class Against:
    """One quantity, planned and measured; None where there is no number.

    Attributes:
        name: what it is.
        unit: of the numbers.
        predicted: by the plan, for the first rank.
        measured: of the rank, or the device, that had most.
        remark: how it was measured.
    """

    name: str
    unit: Literal["bytes", "s"]
    predicted: float | None
    measured: float | None
    remark: str

    @property
    def difference(self) -> float | None:
        """Return by how much more was measured, as a share of what was predicted."""
        if self.predicted is None or self.measured is None or not self.predicted:
            return None
        return self.measured / self.predicted - 1


def memory_rows(
    prediction: Prediction | None,
    *,
    layout: Layout,
    steps: Steps,
    samples: Sequence[NodeSample],
) -> list[Against]:
    """Put the memory that was planned beside what was measured; what was to be compared is first.

    Args:
        prediction: the plan's for the layout that ran; None where it has none.
        layout: that ran.
        steps: the step log.
        samples: of all nodes.
    """
    if layout.device == "cpu":
        return [
            Against(
                "memory of a rank",
                "bytes",
                predicted=None if prediction is None else prediction.peak_bytes,
                measured=_most(steps.records, kind="host"),
                remark="what its process held as steps ended, on the rank that held most",
            ),
            Against(
                "all ranks of a node, with their loaders",
                "bytes",
                predicted=None,
                measured=_largest(each.ranks_memory_bytes for each in samples),
                remark="on the node that held most",
            ),
        ]
    return _device_rows(prediction, steps=steps, samples=samples)


def time_row(prediction: Prediction | None, *, steps: Steps) -> Against:
    """Put the time of a step beside the least that the plan thinks possible."""
    return Against(
        "time of a step",
        "s",
        predicted=None if prediction is None else prediction.step_s,
        measured=steps.median("step_s"),
        remark="the median; what is predicted is a floor: peak rates, no padding, no waiting",
    )


def say_memory(rows: Sequence[Against], *, refused: bool) -> str:
    """Say in a sentence how the memory that was used compares with the plan.

    Args:
        rows: of `memory_rows`.
        refused: whether the plan held that the layout cannot run.
    """
    first = rows[0]
    if first.measured is None:
        planned = f"; the plan had {format_bytes(first.predicted)}" if first.predicted else ""
        return f"Memory was not measured{planned}."
    used = f"{first.name.capitalize()} reached {format_bytes(first.measured)}"
    if first.predicted is None:
        return f"{used}; the plan did not consider this layout, so there is nothing to compare."
    said = f"{used}, {_compared(first)} the {format_bytes(first.predicted)} of the plan"
    return f"{said}, although the plan had refused this layout." if refused else f"{said}."


def say_time(row: Against) -> str:
    """Say in a sentence how the time of a step compares with the plan."""
    if row.measured is None:
        return "The time of a step was not measured."
    took = f"A step took {row.measured:.3f} s"
    if row.predicted is None:
        return f"{took}; the plan predicted none."
    if row.measured < row.predicted:
        return (
            f"{took}, less than the {row.predicted:.3f} s that the plan held to be the least: "
            "the device is faster than the plan's numbers of it."
        )
    times = row.measured / row.predicted
    return f"{took}, {times:.1f} times the least that the plan thinks possible."


def memory_curve(steps: Steps, *, layout: Layout, rows: Sequence[Against]) -> Figure:
    """Draw the memory of the rank that has most over steps, and what was planned as a line."""
    figure = blank("GiB")
    shown: tuple[MemoryKind, ...] = ("host",) if layout.device == "cpu" else ("reserved", "peak")
    records = steps.records
    at_step = thin(steps.column("step"), num_points=MAX_POINTS, reduce="max")
    drawn = False
    for kind, color in zip(shown, (MODEL, PALETTE[2]), strict=False):
        values = np.array([_bytes(record, kind=kind) for record in records], dtype=np.float64)
        if np.isfinite(values).any():
            drawn = True
            values = thin(values / _GIB, num_points=MAX_POINTS, reduce="max")
            figure.add_scatter(x=at_step, y=values, name=kind, line={"color": color, "width": 2})
    planned = rows[0].predicted
    if drawn and planned is not None:
        line = {"color": HELDOUT, "dash": "dot", "width": 1.5}
        x = [at_step[0], at_step[-1]]
        figure.add_scatter(x=x, y=[planned / _GIB] * 2, name="planned", mode="lines", line=line)
    figure.update_layout(height=230)
    return figure


def _device_rows(
    prediction: Prediction | None, *, steps: Steps, samples: Sequence[NodeSample]
) -> list[Against]:
    peak = None if prediction is None else prediction.peak_bytes
    rows = [
        Against(
            "memory that tensors took on a device",
            "bytes",
            predicted=None if peak is None else peak - PROCESS_BYTES["cuda"],
            measured=_most(steps.records, kind="peak"),
            remark="torch's peak, on the rank that had most",
        ),
        Against(
            "memory that torch kept of a device",
            "bytes",
            predicted=None,
            measured=_most(steps.records, kind="reserved"),
            remark="with what its allocator held in reserve",
        ),
        Against(
            "memory in use on a device",
            "bytes",
            predicted=peak,
            measured=_largest(
                device.memory_used_bytes for sample in samples for device in sample.devices
            ),
            remark="by NVML: with the context, communication, and whatever else runs there",
        ),
    ]
    if prediction is not None and prediction.host_bytes:
        rows.append(
            Against(
                "memory of the host that a rank took",
                "bytes",
                predicted=prediction.host_bytes + PROCESS_BYTES["cpu"],
                measured=_most(steps.records, kind="host"),
                remark="what its process held as steps ended, on the rank that held most",
            )
        )
    return rows


def _compared(row: Against) -> str:
    difference = row.difference
    assert difference is not None, "both are known"
    if abs(difference) < 0.005:
        return "the same as"
    return f"{abs(difference):.0%} {'more' if difference > 0 else 'less'} than"


def _bytes(record: StepRecord, *, kind: MemoryKind) -> float:
    over = record.memory_bytes.get(kind)
    return np.nan if over is None else over.most


def _most(records: Sequence[StepRecord], *, kind: MemoryKind) -> float | None:
    return _largest(over.most for each in records if (over := each.memory_bytes.get(kind)))


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
