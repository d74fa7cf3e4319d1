"""`learning_rate`: it is so high that the loss stands still; one that is too low is not judged."""

from __future__ import annotations

from diptych.core.records import Finding
from diptych.monitor.diagnose.findings import change, finding, percent, ramp
from diptych.monitor.diagnose.learning import Learning
from diptych.monitor.diagnose.rules.diverging import judge_diverging
from diptych.monitor.diagnose.settings import Settings
from diptych.monitor.diagnose.signals import Signals

CLIPPED, SURE_CLIPPED = 0.9, 1.0
"""Share of the steps whose gradient was scaled down."""
ABOVE = 3.0
"""The usual gradient norm over the limit."""
GAIN = 0.02
"""The loss that the second half gains, as a share, below which it stands still."""


def judge_learning_rate(signals: Signals, *, settings: Settings) -> Finding | None:
    """Judge whether gradients are clipped in nearly every step, and nothing is learnt."""
    learning, limit = signals.learning, settings.max_grad_norm
    clipped, norm = learning.clipped or 0.0, learning.grad_norm or 0.0
    if not limit or clipped < CLIPPED or norm < ABOVE * limit or not _stands_still(learning):
        return None
    if judge_diverging(signals, settings=settings) is not None:
        return None
    first, second = _lowest(learning)
    return finding(
        "learning_rate",
        "The learning rate is too high",
        cost=None,
        confidence=ramp(clipped, least=CLIPPED, sure=SURE_CLIPPED),
        evidence=(
            f"the gradient norm is usually {norm:.3g}, and "
            f"{percent(clipped)} of the steps are clipped to {limit:g}",
            f"the loss stands still: {first:.4g} in the first half at its lowest, "
            f"{second:.4g} in the second",
        ),
        changes=[
            change(
                "train.optimizer.lr",
                f"{learning.highest_lr / 3:.3g}",
                why="updates that do not overshoot (a new run)",
            ),
            change(
                "train.optimizer.warmup_steps",
                max(50, 2 * settings.warmup_steps),
                why="the first updates are small for longer (a new run)",
            ),
        ],
    )


def _lowest(learning: Learning) -> tuple[float, float]:
    """Return the lowest loss of each half."""
    half = len(learning.loss_parts) // 2
    return min(learning.loss_parts[:half]), min(learning.loss_parts[half:])


def _stands_still(learning: Learning) -> bool:
    """Whether the loss gains next to nothing; close to its end, at a low rate, a run may."""
    if not learning.loss_parts or learning.lr < 0.3 * learning.highest_lr:
        return False
    first, second = _lowest(learning)
    return first - second <= GAIN * abs(second)
