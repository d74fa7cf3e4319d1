"""`vision_imbalance`: ranks wait for each other in turn, because their rows cost unequally."""

from __future__ import annotations

from diptych.core.records import Finding
from diptych.monitor.diagnose.findings import change, finding, percent, ramp, said
from diptych.monitor.diagnose.rules.straggler import is_one_rank
from diptych.monitor.diagnose.settings import Settings
from diptych.monitor.diagnose.signals import Signals
from diptych.monitor.diagnose.times import Imbalance

LEAST, SURE = 0.10, 0.20
"""Share of the time that ranks on average wait for a later one."""
EXPLAINED, FOLLOWS = 0.5, 0.3
"""Share of it that the rows' costs explain, or its correlation with them, that shows the cause."""
UNSHOWN = 0.8
"""What the confidence is multiplied by where neither does: other programs make ranks late, too."""


def judge_vision_imbalance(signals: Signals, *, settings: Settings) -> Finding | None:
    """Judge whether work is dealt out unevenly: images and lengths that differ by rank."""
    times, imbalance = signals.times, signals.imbalance
    if times is None or imbalance is None or is_one_rank(signals):
        return None
    cost = times.waiting
    if cost < LEAST or imbalance.rank_phase not in ("forward", "backward"):
        return None
    return finding(
        "vision_imbalance",
        "Ranks are given unequal work",
        cost=cost,
        confidence=ramp(cost, least=LEAST, sure=SURE)
        * (1.0 if _is_shown(imbalance, cost=cost) else UNSHOWN),
        evidence=(
            f"ranks wait {percent(cost)} of the time for one that computes longer, and which one "
            f"that is changes (rank {imbalance.rank} in {percent(imbalance.dominance)} of it)",
            said("by the cost of their rows, ranks should be idle {}", imbalance.predicted),
            _follows(imbalance.follows_work),
        ),
        steps=imbalance.worst,
        changes=[
            change(
                "train.schedule.balance_steps",
                max(16, 2 * settings.balance_steps),
                why="batches are made of rows of near-equal cost",
                gain=cost,
            ),
            change(
                "train.schedule.mode",
                "pack",
                why="rows hold several samples, so that their lengths and patches are alike",
            )
            if settings.mode == "bucket"
            else None,
            change(
                "train.schedule.patch_weight",
                "0.5",
                why="if images cost more than the schedule supposes (a new run)",
            ),
        ],
    )


def _is_shown(imbalance: Imbalance, *, cost: float) -> bool:
    """Whether it is shown that rows are what makes ranks late."""
    explained = (imbalance.predicted or 0.0) >= EXPLAINED * cost
    return explained or (imbalance.follows_work or 0.0) >= FOLLOWS


def _follows(follows: float | None) -> str | None:
    if follows is None or follows < FOLLOWS:
        return None
    return f"what is lost in a step follows its images and rows (correlation {follows:.2f})"
