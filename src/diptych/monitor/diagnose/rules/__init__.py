"""The rules: each reads signals and settings, and gives a finding of one bound, or None.

A rule that misses a number gives None; `diagnose` says what was missing.
"""

from __future__ import annotations

from typing import Protocol

from diptych.core.records import Finding
from diptych.monitor.diagnose.rules.checkpoint import judge_checkpoint
from diptych.monitor.diagnose.rules.communication import judge_communication
from diptych.monitor.diagnose.rules.data import judge_data
from diptych.monitor.diagnose.rules.decode_cpu import judge_decode_cpu
from diptych.monitor.diagnose.rules.diverging import judge_diverging
from diptych.monitor.diagnose.rules.evaluation import judge_evaluation
from diptych.monitor.diagnose.rules.fragmentation import judge_fragmentation
from diptych.monitor.diagnose.rules.host_launch import judge_host_launch
from diptych.monitor.diagnose.rules.learning_rate import judge_learning_rate
from diptych.monitor.diagnose.rules.memory import judge_memory
from diptych.monitor.diagnose.rules.nan_risk import judge_nan_risk
from diptych.monitor.diagnose.rules.padding import judge_padding
from diptych.monitor.diagnose.rules.small_kernels import judge_small_kernels
from diptych.monitor.diagnose.rules.straggler import judge_straggler
from diptych.monitor.diagnose.rules.throttling import judge_throttling
from diptych.monitor.diagnose.rules.vision_imbalance import judge_vision_imbalance
from diptych.monitor.diagnose.settings import Settings
from diptych.monitor.diagnose.signals import Signals


class Rule(Protocol):
    """What judges one bound."""

    def __call__(self, signals: Signals, *, settings: Settings) -> Finding | None:
        """Return a finding, or None where the bound is not there or cannot be judged."""
        ...


RULES: tuple[Rule, ...] = (
    judge_nan_risk,
    judge_diverging,
    judge_learning_rate,
    judge_decode_cpu,
    judge_data,
    judge_throttling,
    judge_straggler,
    judge_vision_imbalance,
    judge_communication,
    judge_checkpoint,
    judge_evaluation,
    judge_padding,
    judge_host_launch,
    judge_small_kernels,
    judge_fragmentation,
    judge_memory,
)
"""All rules; each bound has one."""
