"""`diverging`: the loss rises, and stays above what it was."""

from __future__ import annotations

from diptych.core.records import Finding
from diptych.monitor.diagnose.findings import change, finding, ramp
from diptych.monitor.diagnose.settings import Settings
from diptych.monitor.diagnose.signals import Signals

RISE = 0.2
"""The last part's loss above the lowest part's, as a share of it."""
NOISES, SURE_NOISES = 4.0, 8.0
"""And in how much a step's loss usually differs."""


def judge_diverging(signals: Signals, *, settings: Settings) -> Finding | None:
    """Judge whether the loss rises by more than its noise, over at least the last two parts."""
    learning = signals.learning
    parts, noise = learning.loss_parts, learning.loss_noise
    if not parts or noise is None:
        return None
    lowest = min(parts)
    rise = min(parts[-1], parts[-2]) - lowest
    floor = max(noise, 1e-3 * abs(lowest), 1e-9)
    if rise < RISE * abs(lowest) or rise < NOISES * floor or parts[-1] < parts[-2] - noise:
        return None
    at = parts.index(lowest)
    num = signals.last_step - signals.first_step + 1
    begin = signals.first_step + num * (at + 1) // len(parts)
    return finding(
        "diverging",
        "The loss rises",
        cost=None,
        confidence=ramp(rise / floor, least=NOISES, sure=SURE_NOISES),
        evidence=(
            f"the loss was {lowest:.4g} at its lowest and is {parts[-1]:.4g} now; a step's differs "
            f"by {noise:.2g}",
            f"the learning rate is {learning.lr:.3g}, and was {learning.highest_lr:.3g} at most",
        ),
        steps=range(begin, signals.last_step + 1),
        changes=[
            change(
                "train.optimizer.lr",
                f"{settings.lr / 3:.3g}",
                why="smaller updates; train.fork_from goes on from a checkpoint before the rise",
            ),
            change(
                "train.optimizer.warmup_steps",
                max(50, 2 * settings.warmup_steps),
                why="the first updates are small for longer (a new run)",
            ),
            change(
                "train.optimizer.max_grad_norm",
                f"{0.3 * (settings.max_grad_norm or 1.0):.2g}",
                why="a single batch moves the weights less",
            ),
        ],
    )
