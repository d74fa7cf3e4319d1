"""The ranks' part of the preflight: a process group in, one answer of all ranks out.

`python -m diptych.worker preflight <folder> <logs>` runs it; the first rank leaves `ranks.json`
in the logs' folder. Only workers import this.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from diptych.core.errors import DiptychError
from diptych.core.files import write_text
from diptych.core.host import node_name
from diptych.core.nvml import open_nvml, select_visible
from diptych.core.records import Check, CheckStatus, LoaderState, RunSpec
from diptych.core.units import format_count
from diptych.data.costs import load_costs
from diptych.data.loader import Loader
from diptych.data.schedule.schedule import Schedule
from diptych.data.shards.manifest import load_manifest
from diptych.launch.agreement import agree
from diptych.launch.devices import check_devices
from diptych.launch.elastic import ANSWER
from diptych.parallel import mesh
from diptych.parallel.mesh import World

_WORST: dict[CheckStatus, int] = {"fail": 0, "warn": 1, "pass": 2, "skip": 3}
_REDUCED_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
_ROUNDS = 5
_LOAD_S = 2.0


def check_ranks(folder: Path, *, logs: Path, spec: RunSpec, world: World) -> None:
    """Look at every rank's machine and at what lies between them; the first one writes it down."""
    agreement = agree(folder, world=world)
    own = [*_check_machine(world), check_loading(spec, world=world)]
    texts = mesh.gather_texts(_dump(own), world=world)
    bytes_per_s = measure_all_reduce(world)
    nodes = mesh.gather_texts(node_name(), world=world)
    if world.is_first:
        of_all = [[Check.model_validate(each) for each in json.loads(text)] for text in texts]
        checks = [*agreement.checks, *merge(of_all, nodes=nodes)]
        answer = {
            "checks": [check.model_dump(mode="json") for check in checks],
            "bytes_per_s": bytes_per_s,
        }
        write_text(logs / ANSWER, text=json.dumps(answer, indent=1) + "\n")
    agreement.lock.release()


def merge(of_all: Sequence[Sequence[Check]], *, nodes: Sequence[str]) -> list[Check]:
    """Make one check of each that all ranks have made: the worst, and which ranks say it.

    Args:
        of_all: the checks of every rank, in the same order on each.
        nodes: of every rank.
    """
    return [_worst(checks, nodes=nodes) for checks in zip(*of_all, strict=True)]


def _worst(checks: Sequence[Check], *, nodes: Sequence[str]) -> Check:
    """Take the worst of one check of all ranks, and say whose it is."""
    worst = min(checks, key=lambda check: _WORST[check.status])
    ranks = [rank for rank, check in enumerate(checks) if check.status == worst.status]
    found = worst.found
    if any(checks[rank].found != found for rank in ranks):
        found = f"{found} (rank {ranks[0]}; others differ a little)"
    where = "all ranks"
    if len(ranks) < len(checks):
        on = list(dict.fromkeys(nodes[rank] for rank in ranks))
        where = f"ranks {', '.join(map(str, ranks[:8]))} on {', '.join(on[:4])}"
    return worst.model_copy(update={"found": found, "where": where})


def measure_all_reduce(world: World) -> float | None:
    """Return the bytes per second that a ring moves over each link while ranks add a tensor.

    Source: nccl-tests' PERFORMANCE.md, the bus bandwidth: 2 (n - 1) / n of the bytes, in the time.
    """
    if world.size == 1:
        return None
    num_bytes = _REDUCED_BYTES[world.device.type]
    tensor = torch.ones(num_bytes // 4, dtype=torch.float32, device=world.device)
    seconds = []
    for _ in range(_ROUNDS + 1):
        mesh.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        seconds.append(time.perf_counter() - begin)
    # The first one opens connections; ranks are as fast as the slowest.
    slowest = mesh.gather_numbers(seconds[1:], world=world).max(axis=0)
    return float(2 * (world.size - 1) / world.size * num_bytes / sorted(slowest)[_ROUNDS // 2])


def check_loading(spec: RunSpec, *, world: World, for_s: float = _LOAD_S) -> Check:
    """Load this rank's first batches for a moment, and say how many samples a second that is."""
    placement = spec.placement
    if placement.vision_features is not None:
        found = "what a frozen tower computes is read in place of images"
        return Check(name="loading", status="skip", found=found)
    try:
        manifest = load_manifest(Path(placement.manifest))
        costs = load_costs(
            Path(placement.sample_costs),
            manifest=manifest,
            split="train",
            processor_sha256=spec.identity.processor_sha256,
        )
        loader = Loader(
            shards=placement.shards,
            manifest=manifest,
            processor=Path(placement.processor),
            schedule=Schedule(costs, buckets=spec.identity.buckets, spec=spec.identity.schedule),
            split="train",
            rank=world.rank,
            world_size=world.size,
            micro_batch=placement.layout.micro_batch,
            num_workers=0,
            state=LoaderState(),
        )
        num_samples, num_masked, seconds = _load(loader, for_s=for_s)
    except (DiptychError, OSError) as error:
        return Check(
            name="loading",
            status="fail",
            found=" ".join(str(error).split()),
            cure="See that the shards can be read from this node",
        )
    told = f"{format_count(num_samples / seconds)} samples/s of a rank, in its own process"
    if num_masked:
        return Check(
            name="loading",
            status="warn",
            found=f"{told}; {num_masked} samples could not be read",
            cure="kedro run --pipelines=prepare makes the shards again",
        )
    return Check(name="loading", status="pass", found=told)


def _load(loader: Loader, *, for_s: float) -> tuple[int, int, float]:
    num_samples = num_masked = 0
    begin = time.perf_counter()
    for batch in loader:
        num_samples += batch.num_samples
        num_masked += len(batch.masked_keys)
        if time.perf_counter() - begin >= for_s:
            break
    return num_samples, num_masked, time.perf_counter() - begin


def _check_machine(world: World) -> list[Check]:
    """Look at this rank's machine; its GPU is the one that CUDA shows it under its number."""
    nvml = open_nvml() if world.device.type == "cuda" else None
    if nvml is None:
        return list(check_devices())
    count = nvml.nvmlDeviceGetCount()
    uuids = [
        str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(each))) for each in range(count)
    ]
    visible = select_visible(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids=uuids)
    return list(check_devices(nvml, index=visible[world.device.index or 0]))


def _dump(checks: Sequence[Check]) -> str:
    return json.dumps([check.model_dump(mode="json") for check in checks])
