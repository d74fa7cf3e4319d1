"""When to go on after a bad step, and when to give up."""

from __future__ import annotations

from diptych.core.errors import RunError
from diptych.parallel.engine import Update

MAX_CONSECUTIVE_SKIPS = 10


class SkipGuard:
    """Counts steps whose gradient was not finite; ends the run when they follow each other.

    While a loss scale shrinks, skipped steps are its search and not counted.
    """

    def __init__(self) -> None:
        self._consecutive = 0

    def observe(self, step: int, *, update: Update, found: str | None = None) -> None:
        """Take note of a step, and of what was found out about it.

        Raises:
            RunError: too many steps in a row had a gradient that is not finite.
        """
        if update.applied:
            self._consecutive = 0
        elif not update.can_shrink:
            self._consecutive += 1
        if self._consecutive >= MAX_CONSECUTIVE_SKIPS:
            raise RunError(
                f"The gradient was not finite in {self._consecutive} steps up to step {step}"
                + (f": {found}" if found else ""),
                cure="Lower train.optimizer.lr, raise warmup_steps, or use precision fp32"
                + ("" if found else "; train.name_nonfinite: true says which module it was"),
            )
