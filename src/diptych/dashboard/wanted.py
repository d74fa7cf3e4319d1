"""What a page asks for, checked: values from a browser in, a record out, or an error.

Nothing of it is a path: runs are named by keys, nodes by names that the run's folder has.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from diptych.core.records import Record
from diptych.dashboard.charts import Axis, Tab
from diptych.dashboard.figures import COLORS, Look, View, X

MOST_RUNS = 8

_Number = Annotated[float, Field(allow_inf_nan=False)]


class Chosen(Record):
    """One run that is chosen, and its colour's number."""

    key: str = Field(max_length=300)
    color: int = Field(default=0, ge=0, lt=len(COLORS))


class Views(Record):
    """Which part of each axis is in view, None is all of it; `acted`: by which chart."""

    steps: tuple[_Number, _Number] | None = None
    clock: tuple[_Number, _Number] | None = None
    acted: str | None = Field(default=None, max_length=40)

    @field_validator("steps", "clock")
    @classmethod
    def _in_order(cls, view: View) -> View:
        return None if view is None or view[0] >= view[1] else view


class Wanted(Record):
    """What a page shows. `smooth` is over how many steps, `focus` the run that is shown alone."""

    tab: Tab = "loss"
    chosen: tuple[Chosen, ...] = Field(default=(), max_length=MOST_RUNS)
    views: Views = Views()
    x: X = "step"
    smooth: Literal[1, 11, 101, 1001] = 1
    log: bool = False
    focus: str | None = Field(default=None, max_length=300)
    node: str | None = Field(default=None, max_length=300)

    def look(self, axis: Axis) -> Look:
        """Return how charts over an axis are drawn."""
        view = self.views.steps if axis == "steps" else self.views.clock
        return Look(x=self.x, view=view, width=self.smooth, log=self.log)
