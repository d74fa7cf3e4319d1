"""What was looked at before a run starts, and what was found: a run folder's `preflight.json`."""

from __future__ import annotations

from typing import Literal

from diptych.core.records.base import FORMAT_VERSION, Record

CheckStatus = Literal["pass", "warn", "fail", "skip"]


class Check(Record):
    """One thing that was looked at.

    `found` is what there is, `cure` what to do about it, `where` the driver or the ranks that say
    so. `skip`: it does not apply here, or could not be looked at; `found` says why.
    """

    name: str
    status: CheckStatus
    found: str
    cure: str = ""
    where: str = "driver"


class Preflight(Record):
    """All of them, for one run."""

    version: int = FORMAT_VERSION
    run_id: str
    host: str
    time_s: float
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """List what keeps the run from starting."""
        return tuple(check for check in self.checks if check.status == "fail")

    @property
    def warned(self) -> tuple[Check, ...]:
        """List what a person should know and may leave as it is."""
        return tuple(check for check in self.checks if check.status == "warn")
