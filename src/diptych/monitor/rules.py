"""What is wrong with a run, one rule a kind of alert: numbers in, a judgement out. Pure.

A judgement is a text where something is wrong, `FINE` where it is not, and None where there is
nothing new to say. What ends an alert is a milder bound than what begins it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

from diptych.core.records import NodeSample, Phase, StepRecord
from diptych.core.units import format_bytes, format_count, format_seconds
from diptych.monitor.trend import Trend

FINE = ""
_WORK: tuple[Phase, ...] = ("data", "place", "forward", "backward", "update")


class NanRule:
    """Losses that are not finite, and skipped steps.

    With fp16 a few skipped steps are how its loss scale is found: many of them are wrong.
    """

    _HEALTHY_STEPS, _RECENT, _MOST_OVERFLOWS = 50, 50, 10

    def __init__(self) -> None:
        self._num_healthy = 0
        self._overflows: deque[bool] = deque(maxlen=self._RECENT)

    def note(self, record: StepRecord) -> str | None:
        """Judge a step."""
        overflows = record.skipped and record.loss is not None and record.loss_scale is not None
        self._overflows.append(overflows)
        num_overflows = sum(self._overflows)
        is_bad = record.loss is None or (record.skipped and not overflows)
        if is_bad or num_overflows > self._MOST_OVERFLOWS:
            self._num_healthy = 0
            return self._say(record, num_overflows=num_overflows)
        self._num_healthy += not record.skipped
        return FINE if self._num_healthy >= self._HEALTHY_STEPS else None

    def _say(self, record: StepRecord, *, num_overflows: int) -> str:
        if record.loss is not None and num_overflows > self._MOST_OVERFLOWS:
            return (
                f"{num_overflows} of the last {len(self._overflows)} steps overflowed in fp16 "
                f"(loss scale {record.loss_scale:g}) and were skipped. Use bf16, or a lower "
                "learning rate"
            )
        what = "loss" if record.loss is None else "gradient norm"
        where = f", first in {record.nonfinite}" if record.nonfinite else ""
        cure = "" if record.nonfinite else "; train.name_nonfinite says where it begins"
        return (
            f"the {what} is not finite{where}; {record.num_skipped} steps skipped so far. Lower "
            f"the learning rate or clip harder, and look at this batch's samples{cure}"
        )


class DivergenceRule:
    """A loss that stays far above the lowest that the run has had."""

    _WINDOW, _EVERY, _TIMES = 20, 5, 4
    _SHARE, _NOISES = 0.25, 4.0

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=5 * self._WINDOW)
        self._num_seen = self._num_above = 0
        self._lowest, self._noise = math.inf, 0.0

    def note(self, record: StepRecord) -> str | None:
        """Judge a step; a loss that is not finite is another rule's."""
        if record.loss is None:
            return None
        self._losses.append(record.loss)
        self._num_seen += 1
        if self._num_seen < 2 * self._WINDOW or self._num_seen % self._EVERY:
            return None
        recent = median(list(self._losses)[-self._WINDOW :])
        if recent <= self._lowest:
            self._lowest, self._noise = recent, _noise(self._losses)
        above = recent - self._lowest
        margin = max(self._SHARE * abs(self._lowest), self._NOISES * self._noise)
        self._num_above = self._num_above + 1 if above > margin else 0
        if self._num_above >= self._TIMES:
            return (
                f"the loss is {recent:.4g} (median of {self._WINDOW} steps) and was as low as "
                f"{self._lowest:.4g}. Go back to a checkpoint before the rise with a lower "
                "learning rate or more warm-up (fork the run)"
            )
        return FINE if above <= margin / 2 else None


class ThroughputRule:
    """Tokens per second far below what the run had before."""

    _WARMUP, _WINDOW, _WINDOWS, _TIMES = 20, 20, 50, 2
    _LOW, _HIGH = 0.7, 0.85

    def __init__(self) -> None:
        self._num_seen = self._num_low = 0
        self._window: list[float] = []
        self._medians: deque[float] = deque(maxlen=self._WINDOWS)

    def note(self, record: StepRecord) -> str | None:
        """Judge a step; steps are compared in windows."""
        self._num_seen += 1
        if self._num_seen <= self._WARMUP:
            return None
        self._window.append(record.tokens_per_s)
        if len(self._window) < self._WINDOW:
            return None
        now, self._window = median(self._window), []
        before = median(self._medians) if len(self._medians) >= 2 else None
        if before is None or now >= self._HIGH * before:
            self._medians.append(now)
            self._num_low = 0
            return None if before is None else FINE
        self._num_low = self._num_low + 1 if now < self._LOW * before else 0
        if self._num_low < self._TIMES:
            return None
        return (
            f"{format_count(now)} tokens/s, {1 - now / before:.0%} below the run's own "
            f"{format_count(before)}. See which phase has grown (data, communication), whether "
            "devices are throttled, and who else uses the nodes"
        )


class StragglerRule:
    """One rank that nearly always takes the most time for the same work, and far more than others.

    Args:
        nodes: of every rank, where they are known.
    """

    _STEPS, _EVERY = 50, 5
    _OFTEN, _SELDOM = 0.9, 0.6
    _LARGE, _SMALL = 0.10, 0.05

    def __init__(self, nodes: Sequence[str] = ()) -> None:
        self._nodes = nodes
        self._records: deque[StepRecord] = deque(maxlen=self._STEPS)

    def note(self, record: StepRecord) -> str | None:
        """Judge a step."""
        if not record.phases_s:
            return None
        self._records.append(record)
        if len(self._records) < self._STEPS or record.step % self._EVERY:
            return None
        worst = max((self._judge(phase) for phase in _WORK), key=lambda each: each[3])
        phase, rank, often, excess = worst
        if often >= self._OFTEN and excess >= self._LARGE:
            where = f" on {self._nodes[rank]}" if rank < len(self._nodes) else ""
            return (
                f"rank {rank}{where} is the slowest in {phase} in {often:.0%} of the last "
                f"{self._STEPS} steps, and takes {excess:.0%} of a step longer than the mean. See "
                "its device's clocks and temperature and its node's load; leave the node out"
            )
        return FINE if often < self._SELDOM or excess < self._SMALL else None

    def _judge(self, phase: Phase) -> tuple[Phase, int, float, float]:
        """Return (phase, rank, how often it is the slowest, by which share of the steps)."""
        overs = [each.phases_s[phase] for each in self._records if phase in each.phases_s]
        ranks = Counter(over.rank for over in overs if over.most > over.least)
        if not ranks:
            return phase, 0, 0.0, 0.0
        rank, count = ranks.most_common(1)[0]
        excess_s = sum(over.most - over.mean for over in overs if over.rank == rank)
        steps_s = sum(each.step_s for each in self._records)
        return phase, rank, count / len(overs), excess_s / steps_s if steps_s > 0 else 0.0


class CommunicationRule:
    """Communication that no computation hides, against computing.

    It is that of the rank that waits least: what others wait beyond is for slower ranks.
    """

    _STEPS = 50
    _LARGE, _SMALL = 0.30, 0.25

    def __init__(self) -> None:
        self._seconds: deque[tuple[float, float]] = deque(maxlen=self._STEPS)

    def note(self, record: StepRecord) -> str | None:
        """Judge a step."""
        phases = record.phases_s
        computes = [phases[phase].mean for phase in ("forward", "backward") if phase in phases]
        if "communication" not in phases or not computes:
            return None
        self._seconds.append((phases["communication"].least, sum(computes)))
        compute_s = sum(compute for _, compute in self._seconds)
        if len(self._seconds) < self._STEPS or compute_s <= 0:
            return None
        share = sum(exposed for exposed, _ in self._seconds) / compute_s
        if share > self._LARGE:
            return (
                f"ranks wait {share:.0%} of their computing time for communication (last "
                f"{self._STEPS} steps). Shard within a node alone, use larger micro-batches or "
                "fewer exchanges a step, and check the links (kedro check)"
            )
        return FINE if share < self._SMALL else None


class DeviceMemoryRule:
    """Memory that the program holds on a device and that grows without end."""

    _LEAST_BYTES = 64 << 20

    def __init__(self) -> None:
        self._trend = Trend(least=self._LEAST_BYTES)

    def note(self, record: StepRecord) -> str | None:
        """Judge a step."""
        over = record.memory_bytes.get("allocated")
        if over is None or self._trend.add(over.most) is None:
            return None
        rise = self._trend.rise
        if rise is None:
            return None if self._trend.is_rising else FINE
        return (
            f"memory held on the device (rank {over.rank}) grew from {format_bytes(rise.first)} to "
            f"{format_bytes(rise.last)} over the last {rise.num_values} steps. Something keeps "
            "tensors from step to step, such as a loss that was not detached; take a memory profile"
        )


class HostMemoryRule:
    """Memory of a host that grows without end, or that is nearly used up."""

    _LEAST_BYTES = 256 << 20
    _LITTLE, _ENOUGH = 0.05, 0.08
    _SAMPLES = 24

    def __init__(self) -> None:
        self._ranks = Trend(least=self._LEAST_BYTES)
        self._nodes: dict[str, Trend] = {}
        self._nodes_are_bad = False

    def note(self, record: StepRecord) -> str | None:
        """Judge a step: the rank that has the most memory."""
        over = record.memory_bytes.get("host")
        if over is None or self._ranks.add(over.most) is None:
            return None
        if self._ranks.rise is None:
            return None if self._nodes_are_bad or self._is_rising() else FINE
        return self._say(f"rank {over.rank}", self._ranks, unit="steps")

    def note_samples(self, samples: Sequence[NodeSample]) -> str | None:
        """Judge nodes: what is free, and what this run's processes hold."""
        judgement = self._judge_nodes(samples)
        self._nodes_are_bad = judgement is None or judgement != FINE
        return judgement

    def _judge_nodes(self, samples: Sequence[NodeSample]) -> str | None:
        little = self._judge_free(samples)
        if little:
            return little
        for sample in samples:
            if sample.ranks_memory_bytes is not None:
                trend = self._nodes.setdefault(
                    sample.node, Trend(least=self._LEAST_BYTES, window=self._SAMPLES)
                )
                trend.add(sample.ranks_memory_bytes)
        for node, trend in self._nodes.items():
            if trend.rise is not None:
                return self._say(f"this run on {node}", trend, unit="samples")
        return None if little is None or self._is_rising() else FINE

    def _judge_free(self, samples: Sequence[NodeSample]) -> str | None:
        """Judge the node with the smallest share of free memory."""
        shares = {
            sample.node: (sample.memory_available_bytes, sample.memory_total_bytes)
            for sample in samples
            if sample.memory_available_bytes is not None and sample.memory_total_bytes
        }
        if not shares:
            return None
        node, (free, total) = min(shares.items(), key=lambda item: item[1][0] / item[1][1])
        if free / total < self._LITTLE:
            return (
                f"{format_bytes(free)} of {format_bytes(total)} memory are free on {node}; ranks "
                "are killed when there is none. Lower train.num_workers or the image cache"
            )
        return FINE if free / total >= self._ENOUGH else None

    def _is_rising(self) -> bool:
        return self._ranks.is_rising or any(trend.is_rising for trend in self._nodes.values())

    def _say(self, whose: str, trend: Trend, *, unit: str) -> str:
        rise = trend.rise
        assert rise is not None, "only a rise is told"
        return (
            f"host memory of {whose} grew from {format_bytes(rise.first)} to "
            f"{format_bytes(rise.last)} over the last {rise.num_values} {unit}. Set "
            "train.num_workers to 0 for a while to see whether loaders or the rank hold it; the "
            "run goes on from its checkpoint when it is started anew"
        )


class DiskRule:
    """A disk on which the run's next checkpoint has no room."""

    _LITTLE, _MORE = 0.05, 1.2

    def note(
        self, *, free_bytes: int, total_bytes: int, checkpoint_bytes: int | None
    ) -> str | None:
        """Judge the disk of the run's folder; a checkpoint is as large as the newest."""
        need = max(self._LITTLE * total_bytes, checkpoint_bytes or 0)
        if free_bytes < need:
            size = (
                f"; one more checkpoint takes {format_bytes(checkpoint_bytes)}"
                if checkpoint_bytes
                else ""
            )
            return (
                f"{format_bytes(free_bytes)} of {format_bytes(total_bytes)} are free on the disk "
                f"of the run's folder{size}. Free some room, or keep fewer checkpoints"
            )
        return FINE if free_bytes >= self._MORE * need else None


class StallRule:
    """No step for much longer than the run's own steps take.

    Args:
        start_s: when the attempt began, by the clock that is used throughout.
        slow_every: after multiples of these a step may take long: held-out losses, checkpoints.
            After a profiled one, it may always.
    """

    _FIRST_S, _SLOW_S, _LEAST_S = 900.0, 900.0, 120.0
    _STEPS, _TIMES, _GAP_TIMES = 50, 30.0, 3.0

    def __init__(self, *, start_s: float, slow_every: Sequence[int] = ()) -> None:
        self._last_s = start_s
        self._step: int | None = None
        self._slow_every = [every for every in slow_every if every > 0]
        self._gaps: deque[float] = deque(maxlen=self._STEPS)
        self._longest_s = 0.0
        self._is_profiled = False

    def note(self, record: StepRecord, *, now_s: float) -> str | None:
        """Take in a step: nothing stalls."""
        if self._step is not None and not record.profiled:
            gap_s = now_s - self._last_s
            self._gaps.append(gap_s)
            self._longest_s = max(self._longest_s, gap_s)
        self._last_s, self._step = now_s, record.step
        self._is_profiled = record.profiled
        return FINE

    def check(self, *, now_s: float) -> str | None:
        """Judge how long no step has come."""
        quiet_s = now_s - self._last_s
        if quiet_s <= self._limit_s():
            return None
        own = f"; a step takes {format_seconds(median(self._gaps))}" if self._gaps else ""
        since = "yet" if self._step is None else f"since step {self._step}"
        return (
            f"no step {since} for {format_seconds(quiet_s)}{own}. See what ranks print (kedro "
            "logs --all) and where they stand (py-spy dump); a rank that waits for a lost one ends "
            "after train.launch.network.timeout_s"
        )

    def _limit_s(self) -> float:
        if self._step is None or not self._gaps:
            return self._FIRST_S
        usual_s = max(
            self._LEAST_S, self._TIMES * median(self._gaps), self._GAP_TIMES * self._longest_s
        )
        # A record comes one step late.
        coming = (self._step + 1, self._step + 2)
        is_slow = any(step % every == 0 for step in coming for every in self._slow_every)
        # Its trace may be being written.
        is_slow = is_slow or self._is_profiled
        return max(usual_s, self._SLOW_S) if is_slow else usual_s


def _noise(values: Iterable[float]) -> float:
    """Estimate the standard deviation around a slow trend, whatever single values do."""
    steps = [abs(later - earlier) for earlier, later in pairwise(values)]
    # Of a normal distribution: the median of |x| is 0.6745 sigma, differences have sqrt(2) sigma.
    return median(steps) / 0.6745 / math.sqrt(2) if steps else 0.0
