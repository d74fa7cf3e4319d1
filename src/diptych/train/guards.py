"""When to go on after a bad step, and when to give up."""

from __future__ import annotations

from diptych.core.errors import RunError

MAX_CONSECUTIVE_SKIPS = 10


class SkipGuard:
    """Counts steps whose gradient was not finite; ends the run when they follow each other."""

    def __init__(self) -> None:
        self._consecutive = 0

    def observe(self, step: int, *, applied: bool) -> None:
        """Take note of a step.

        Raises:
            RunError: too many steps in a row had a gradient that is not finite.
        """
        self._consecutive = 0 if applied else self._consecutive + 1
        if self._consecutive >= MAX_CONSECUTIVE_SKIPS:
            raise RunError(
                f"The gradient was not finite in {self._consecutive} steps up to step {step}",
                cure="Lower train.optimizer.lr, raise warmup_steps, or use precision fp32",
            )
