"""What was observed of a run: its folder in, records, samples and settings out, and a diagnosis.

Works while the run goes on: a line that is still being written is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diptych.core.errors import FormatError, RunError
from diptych.core.records import Diagnosis, NodeSample, RunSpec, StepRecord
from diptych.monitor.diagnose.diagnose import diagnose
from diptych.monitor.diagnose.settings import Settings, read_settings
from diptych.monitor.diagnose.signals import Signals, measure
from diptych.monitor.run_folder import RunFolder
from diptych.monitor.samples import read_samples


@dataclass(frozen=True)
class Observations:
    """A run's step records in order, its nodes' samples by time, and its spec if it can be read.

    `stage` is the stage that it is the training of, None for the main one.
    """

    run_id: str
    records: Sequence[StepRecord]
    samples: Sequence[NodeSample]
    spec: RunSpec | None
    stage: str | None = None

    @property
    def settings(self) -> Settings | None:
        """Return what the run is set to."""
        return None if self.spec is None else read_settings(self.spec)

    def measure(self, *, steps: tuple[int, int] | None = None) -> Signals:
        """Sum up the steps of a window.

        Raises:
            RunError: the window has no step; says which there are.
        """
        check_steps(self, steps=steps)
        return measure(self.records, samples=self.samples, settings=self.settings, steps=steps)

    def diagnose(self, *, steps: tuple[int, int] | None = None) -> Diagnosis:
        """Name what bounds the run; settings are named as its stage has them.

        Raises:
            RunError: the window has no step; says which there are.
        """
        check_steps(self, steps=steps)
        found = diagnose(
            self.records,
            run_id=self.run_id,
            samples=self.samples,
            settings=self.settings,
            steps=steps,
        )
        return found if self.stage is None else _of_stage(found, stage=self.stage)


def read_observations(path: Path, *, stage: str | None = None) -> Observations:
    """Read a run's folder.

    Raises:
        RunError: no step has been logged yet.
        FormatError: a line of the step log cannot be read.
    """
    folder = RunFolder(path)
    try:
        records = folder.read_steps()
    except ValueError as error:
        told = " ".join(str(error).split())[:200]
        raise FormatError(f"{folder.steps} cannot be read: {told}") from error
    if not records:
        raise RunError(
            f"Run {path.name} has logged no step yet, so there is nothing to judge",
            cure=f"kedro watch {path.name} shows how far it is",
        )
    spec = None
    with suppress(OSError, ValueError):
        spec = folder.read_spec()
    return Observations(
        run_id=path.name,
        records=records,
        samples=read_samples(folder.samples, since_s=0.0),
        spec=spec,
        stage=stage,
    )


def check_steps(observed: Observations, *, steps: tuple[int, int] | None) -> None:
    """Refuse a window that has no step.

    Raises:
        RunError: says which steps there are.
    """
    if steps is None or any(steps[0] <= each.step <= steps[1] for each in observed.records):
        return
    first, last = observed.records[0].step, observed.records[-1].step
    raise RunError(
        f"Run {observed.run_id} has logged no step from {steps[0]} to {steps[1]}",
        allowed=f"Its steps are {first} to {last}",
    )


def _of_stage(found: Diagnosis, *, stage: str) -> Diagnosis:
    """Name settings as they are in a stage, which has its own `train` and `plan`."""

    def name(setting: str) -> str:
        shared = setting.startswith("prepare.")
        return setting if shared else f"stages.{stage}.{setting}"

    findings = tuple(
        each.model_copy(
            update={
                "changes": tuple(
                    change.model_copy(update={"setting": name(change.setting)})
                    for change in each.changes
                )
            }
        )
        for each in found.findings
    )
    return found.model_copy(update={"findings": findings})
