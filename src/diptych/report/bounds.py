"""In: a finished run's folder, its steps and its spec. Out: what its report says of its speed."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.core.records import Diagnosis, NodeSample, RunSpec
from diptych.monitor.observations import Observations
from diptych.report.steps import Steps


def explain_speed(
    steps: Steps, *, samples: Sequence[NodeSample], run_spec: RunSpec
) -> Diagnosis | None:
    """Say why a run was as fast as it was; None where it has logged no step."""
    if not steps.records:
        return None
    observed = Observations(
        run_id=run_spec.run_id, records=steps.records, samples=samples, spec=run_spec
    )
    return observed.diagnose()
