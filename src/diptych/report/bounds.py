"""In: a finished run's folder, its steps and its spec. Out: what its report says of its speed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diptych.core.records import Diagnosis, Phase, RunSpec
from diptych.monitor.diagnose.times import PHASES, Times, measure_times, without_profiled
from diptych.monitor.observations import Observations
from diptych.monitor.run_folder import RunFolder
from diptych.monitor.samples import read_samples
from diptych.report.steps import Steps


@dataclass(frozen=True)
class Speed:
    """Why a run was as fast as it was.

    `phases` has each phase's share of the time, the mean over ranks and that of the rank which had
    most; empty where it was not measured.
    """

    diagnosis: Diagnosis
    phases: tuple[tuple[Phase, float, float], ...]


def explain_speed(run_folder: Path, *, steps: Steps, run_spec: RunSpec) -> Speed | None:
    """Diagnose a run for its report; None where it has logged no step."""
    if not steps.records:
        return None
    observed = Observations(
        run_id=run_spec.run_id,
        records=steps.records,
        samples=read_samples(RunFolder(run_folder).samples, since_s=0.0),
        spec=run_spec,
    )
    times = measure_times(without_profiled(steps.records))
    return Speed(observed.diagnose(), phases=() if times is None else _rows(times))


def _rows(times: Times) -> tuple[tuple[Phase, float, float], ...]:
    found: list[tuple[Phase, float, float]] = [
        (name, times.shares[name], times.latest[name]) for name in PHASES
    ]
    return tuple(row for row in found if row[2] > 0)
