"""Metrics under the names that the field uses: a `StepRecord` in, a flat dictionary out.

What was not measured is absent. `docs/observing.md` has the table of the names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from diptych.core.records import DeviceSample, NodeSample, StepRecord

_T = TypeVar("_T")

_GB = 1e9
_TOWERS = {"vision": "vision_encoder", "language": "llm"}
"""Towers whose names are others in metrics of gradients."""

_RATES = {"language": "llm"}


def step_metrics(
    record: StepRecord,
    *,
    samples: Iterable[NodeSample] = (),
    contrast_weight: float | None = None,
    is_packed: bool = False,
) -> dict[str, float]:
    """Name the numbers of a step, and of what its nodes did meanwhile.

    Args:
        record: of the step.
        samples: the newest one of each node that has one.
        contrast_weight: what the contrastive loss counts, where there is one.
        is_packed: whether rows hold several samples, so that their fill says something.
    """
    found: dict[str, float | None] = {
        **_losses(record, contrast_weight=contrast_weight),
        **_rates(record),
        **_gradients(record),
        **_performance(record, is_packed=is_packed),
        **_phases(record),
        **_memory(record),
        **_progress(record),
        **node_metrics(samples),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def node_metrics(samples: Iterable[NodeSample]) -> dict[str, float | None]:
    """Name the numbers of nodes: the mean of what is used, the worst of what endangers a run."""
    nodes = tuple(samples)
    devices = tuple(device for node in nodes for device in node.devices)
    return {
        "performance/gpu_util": _mean(_of(devices, lambda each: each.busy_fraction)),
        "performance/memory_used_gb": _most(_of(devices, _used_gb)),
        "devices/power_w": _mean(_of(devices, lambda each: each.power_w)),
        "devices/temperature_c": _most(_of(devices, lambda each: each.temperature_c)),
        "devices/clock_fraction": _least(_of(devices, _clock_fraction)),
        "devices/num_throttled": float(sum(bool(each.throttle_reasons) for each in devices))
        if devices
        else None,
        "devices/num_ecc_errors": _sum(_of(devices, lambda each: each.num_ecc_errors)),
        "devices/nvlink_gb_per_s": _mean(_of(devices, lambda each: _gb(each.nvlink_bytes_per_s))),
        "devices/pcie_gb_per_s": _mean(_of(devices, lambda each: _gb(each.pcie_bytes_per_s))),
        "host/cpu_fraction": _mean(_of(nodes, lambda each: each.cpu_fraction)),
        "host/ranks_cpu_cores": _mean(_of(nodes, lambda each: each.ranks_cpu_cores)),
        "host/loaders_cpu_cores": _mean(_of(nodes, lambda each: each.loaders_cpu_cores)),
        "host/memory_available_gb": _least(
            _of(nodes, lambda each: _gb(each.memory_available_bytes))
        ),
        "host/ranks_memory_gb": _most(_of(nodes, lambda each: _gb(each.ranks_memory_bytes))),
        "host/disk_free_gb": _least(_of(nodes, lambda each: _gb(each.disk_free_bytes))),
        "host/disk_read_gb_per_s": _sum(_of(nodes, lambda each: _gb(each.disk_read_bytes_per_s))),
        "host/disk_write_gb_per_s": _sum(_of(nodes, lambda each: _gb(each.disk_write_bytes_per_s))),
        "host/network_sent_gb_per_s": _sum(
            _of(nodes, lambda each: _gb(each.network_sent_bytes_per_s))
        ),
        "host/network_received_gb_per_s": _sum(
            _of(nodes, lambda each: _gb(each.network_received_bytes_per_s))
        ),
    }


def _losses(record: StepRecord, *, contrast_weight: float | None) -> dict[str, float | None]:
    total = record.loss
    if total is not None and contrast_weight is not None and record.vision_loss is not None:
        total += contrast_weight * record.vision_loss
    return {
        "loss/total": total,
        "loss/language": record.loss,
        "loss/vision": record.vision_loss,
        "loss/heldout": record.heldout_loss,
        **_each("loss/source/", record.loss_by_source),
        **_each("loss/heldout/", record.heldout_loss_by_source),
    }


def _rates(record: StepRecord) -> dict[str, float | None]:
    # A tower without a rate of its own has the optimizer's.
    by_tower = {"language": record.lr, **record.lr_by_tower}
    rates = {_RATES.get(tower, tower): rate for tower, rate in by_tower.items()}
    return {"lr/default": record.lr, **_each("lr/", rates)}


def _gradients(record: StepRecord) -> dict[str, float | None]:
    towers = record.grad_norm_by_tower.items()
    norms = {f"{_TOWERS.get(tower, tower)}_norm": norm for tower, norm in towers}
    return {
        "gradients/norm": record.grad_norm,
        "gradients/loss_scale": record.loss_scale,
        **_each("gradients/", norms),
    }


def _performance(record: StepRecord, *, is_packed: bool) -> dict[str, float | None]:
    def per_s(count: int) -> float | None:
        return count / record.step_s if record.step_s > 0 else None

    idle = record.idle_fraction
    return {
        "performance/tokens_per_second": record.tokens_per_s,
        "performance/text_tokens_per_second": per_s(record.num_text_tokens),
        "performance/image_tokens_per_second": per_s(record.num_image_tokens),
        "performance/samples_per_second": per_s(record.num_samples),
        "performance/padding": record.padding_fraction,
        "performance/pack_fill": 1.0 - record.padding_fraction if is_packed else None,
        # What is idle is 1 - mean / most of the ranks' costs.
        "performance/rank_imbalance": None if idle is None or idle >= 1 else idle / (1 - idle),
        "performance/step_seconds": record.step_s,
        "performance/data_seconds": record.data_s,
        "performance/mfu": record.mfu,
        "performance/hfu": record.hfu,
        "performance/model_tflops_per_second": None
        if record.model_flops is None or record.step_s <= 0
        else record.model_flops / record.step_s / 1e12,
        "performance/num_recompiles": record.num_recompiles,
    }


def _phases(record: StepRecord) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for phase, over in record.phases_s.items():
        found[f"phases/{phase}_seconds"] = over.mean
        found[f"phases/{phase}_seconds_max"] = over.most
    return found


def _memory(record: StepRecord) -> dict[str, float | None]:
    sizes = {f"{kind}_gb": over.most / _GB for kind, over in record.memory_bytes.items()}
    return {**_each("memory/", sizes), "memory/num_alloc_retries": record.num_alloc_retries}


def _progress(record: StepRecord) -> dict[str, float | None]:
    return {
        "progress/epoch": record.epoch,
        "progress/attempt": record.attempt,
        "progress/num_skipped": record.num_skipped,
        "progress/num_masked": record.num_masked,
        "progress/num_failed_saves": record.num_failed_saves,
    }


def _each(prefix: str, values: Mapping[str, float]) -> dict[str, float | None]:
    return {prefix + name: value for name, value in values.items()}


def _of(things: Sequence[_T], value: Callable[[_T], float | None]) -> list[float]:
    return [found for each in things if (found := value(each)) is not None]


def _gb(num_bytes: float | None) -> float | None:
    return None if num_bytes is None else num_bytes / _GB


def _used_gb(device: DeviceSample) -> float | None:
    return _gb(device.memory_used_bytes)


def _clock_fraction(device: DeviceSample) -> float | None:
    if device.clock_hz is None or not device.max_clock_hz:
        return None
    return device.clock_hz / device.max_clock_hz


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _sum(values: Sequence[float]) -> float | None:
    return sum(values) if values else None


def _most(values: Sequence[float]) -> float | None:
    return max(values, default=None)


def _least(values: Sequence[float]) -> float | None:
    return min(values, default=None)
