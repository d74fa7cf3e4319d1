"""`padding`: devices compute tokens that are no sample's."""

from __future__ import annotations

from diptych.core.records import Change, Finding
from diptych.monitor.diagnose.findings import change, finding, percent, ramp, said
from diptych.monitor.diagnose.settings import Settings
from diptych.monitor.diagnose.signals import Signals

LEAST, SURE = 0.20, 0.40
"""Share of tokens that are padding."""


def judge_padding(signals: Signals, *, settings: Settings) -> Finding | None:
    """Judge what padding costs: its share of tokens, of the time that is spent computing."""
    share = signals.padding
    if share < LEAST:
        return None
    times = signals.times
    computing = None if times is None else times.share("forward", "backward")
    cost = None if computing is None else share * computing
    return finding(
        "padding",
        "Much of what is computed is padding",
        cost=cost,
        confidence=ramp(share, least=LEAST, sure=SURE),
        evidence=(
            f"{percent(share)} of the tokens are padding",
            said("computing takes {} of the time", computing),
            None
            if signals.hfu is None or signals.mfu is None
            else f"HFU is {percent(signals.hfu)} and MFU {percent(signals.mfu)}: the rest is "
            "padding and recomputing",
        ),
        changes=[
            *(_of_buckets(settings, cost=cost) if settings.mode == "bucket" else _of_packs()),
            change(
                "plan.layout.memory.token_multiple",
                1,
                why=f"rows are padded to multiples of {settings.token_multiple}",
            )
            if settings.token_multiple > 1
            else None,
        ],
    )


def _of_buckets(settings: Settings, *, cost: float | None) -> list[Change]:
    pack = change(
        "train.schedule.mode",
        "pack",
        why="rows are filled with several samples (a new run)",
        gain=cost,
    )
    group = change(
        "train.schedule.group",
        max(1, settings.group // 2),
        why="fewer rows are padded to the longest of their group (a new run)",
    )
    return [pack, group] if settings.group > 1 else [pack]


def _of_packs() -> list[Change]:
    return [
        change(
            "train.schedule.max_row_tokens",
            "more",
            why="longer rows are filled better (a new run)",
        )
    ]
