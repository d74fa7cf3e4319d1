"""`communication`: ranks exchange gradients or weights while there is nothing to compute."""

from __future__ import annotations

from diptych.core.records import Change, Finding
from diptych.monitor.diagnose.findings import change, finding, percent, ramp
from diptych.monitor.diagnose.settings import Settings
from diptych.monitor.diagnose.signals import Signals

LEAST, SURE = 0.15, 0.30
"""Share of the time that the exchange itself takes, beside waiting for a later rank."""


def judge_communication(signals: Signals, *, settings: Settings) -> Finding | None:
    """Judge the exchange that computing does not hide."""
    times = signals.times
    if times is None or times.exchange < LEAST:
        return None
    cost = times.exchange
    return finding(
        "communication",
        "Communication is not hidden by computing",
        cost=cost,
        confidence=ramp(cost, least=LEAST, sure=SURE),
        evidence=(
            f"ranks spend {percent(times.share('communication'))} of the time in communication "
            f"with nothing to compute; even the last rank to come, which waits for nobody, "
            f"{percent(cost)}",
            f"computing takes {percent(times.share('forward', 'backward'))} of the time",
        ),
        steps=range(signals.first_step, signals.last_step + 1),
        changes=[
            change(
                "plan.layout.grad_sync",
                "last",
                why="gradients travel once a step, not with every micro-batch",
                gain=cost / 2,
            )
            if settings.grad_sync == "every"
            else None,
            *_by_engine(settings, cost=cost),
            change(
                "train.schedule.global_batch",
                2 * settings.global_batch,
                why="twice the rows between two exchanges (a new run)",
                gain=cost / 2,
            ),
            change(
                "train.launch.network.interface",
                "the fastest",
                why="if ranks of several nodes talk over a slow one (`kedro check` shows it)",
            ),
        ],
    )


def _by_engine(settings: Settings, *, cost: float) -> list[Change | None]:
    """List what the engine in use can send less of, or sooner."""
    if settings.engine == "ddp" and settings.compression == "none":
        return [
            change(
                "plan.layout.ddp.compression",
                "bf16",
                why="half the bytes (rounds gradients)",
                gain=cost / 2,
            )
        ]
    if settings.engine == "fsdp2":
        once = settings.gather == "twice"
        return [
            change(
                "plan.layout.fsdp.gather",
                "once",
                why="weights travel once a micro-batch, not twice (takes memory)",
                gain=cost / 3,
            )
            if once
            else None,
            change("plan.layout.replicas", "auto", why="weights stay within a node (HSDP)"),
            change("plan.layout.fsdp.prefetch_forward", 1, why="the next unit is gathered ahead"),
        ]
    if settings.engine == "zero":
        return [change("plan.layout.zero.overlap", True, why="gradients travel beside backward")]
    return []
