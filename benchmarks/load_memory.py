"""Host memory of loading: weights streamed into FSDP2's shards against `from_pretrained`.

A random bf16 checkpoint of 2 GB is loaded by two ranks. Measured is each rank's private memory
(RssAnon, sampled every millisecond) at its peak, above the moment before. Pages of the mapped files
are not in it: they are the kernel's cache, shared by all ranks, and freed when memory is short. The
goal is that a rank's peak stays within 300 MB of its own fp32 shard. Peer is transformers'
`from_pretrained` in fp32 on each rank, before anything is sharded.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from _ranks import run_ranks
from diptych.core.records import ImageSettings, Layout, ModelSpec, OptimizerSpec, TokenIds
from run import Measured

_MB = 1e6
_ROOM_MB = 300
_FILE_ELEMENTS = 10**8
_SIZES = {
    "text": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "vision": {
        "depth": 6,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "deepstack_visual_indexes": [2],
    },
}
_TOKENS = TokenIds(num_tokens=500, pad=0, eos=1, image=2, video=3, vision_start=4, vision_end=5)
_IMAGE = ImageSettings(patch_px=16, merge=2, temporal_patch=2, min_area_px=1024, max_area_px=10**6)


@dataclass
class Peak:
    """Private memory above the moment before; `shard_mb` is what of it is weights that stay."""

    peak_mb: float = 0.0
    shard_mb: float = 0.0


def measure(options: argparse.Namespace) -> Measured:
    """Write a checkpoint, load it both ways, and compare peaks."""
    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as name:
        (checkpoint_gb,) = run_ranks(1, _write, folder=Path(name))
        ours = run_ranks(2, _load_streamed, folder=Path(name))
        theirs = run_ranks(2, _load_whole, folder=Path(name))
    above = max(rank.peak_mb - rank.shard_mb for rank in ours)
    return Measured(
        unit="MB of private memory at the peak of the worst rank, above the moment before",
        ours=max(rank.peak_mb for rank in ours),
        peers={"from_pretrained on each rank": max(rank.peak_mb for rank in theirs)},
        ratio=above,
        goal=f"at most {_ROOM_MB} MB above the rank's shard",
        met=above <= _ROOM_MB,
        raw={
            "checkpoint_gb": checkpoint_gb,
            "streamed": [vars(rank) for rank in ours],
            "from_pretrained": [vars(rank) for rank in theirs],
        },
    )


def _write(folder: Path) -> float:
    """Write random weights file by file; returns their size in GB."""
    import json

    import torch
    from safetensors.torch import save_file

    from diptych.model.assemble import build

    spec = ModelSpec(sizes=_SIZES)
    model = build(spec, tokens=_TOKENS, image=_IMAGE, seed=None, device="meta")
    model.config.save_pretrained(folder)
    weight_map: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())):05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
        tensors.clear()

    for name, parameter in model.named_parameters():
        tensors[name] = torch.empty(parameter.shape, dtype=torch.bfloat16).normal_(std=0.02)
        if sum(each.numel() for each in tensors.values()) > _FILE_ELEMENTS:
            flush()
    flush()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e9


def _load_streamed(folder: Path) -> Peak:
    """Load as a worker does, on this rank of a process group."""
    import torch
    import torch.distributed as dist

    from diptych.model.assemble import build
    from diptych.model.families import units
    from diptych.model.streaming import Reading
    from diptych.parallel.mesh import World
    from diptych.parallel.spread import spread
    from diptych.train.optimizers import build_optimizer
    from diptych.train.step import LossModule

    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    spec = ModelSpec(weights=str(folder))
    _import_model(folder)
    with _peak() as peak:
        model = build(spec, tokens=_TOKENS, image=_IMAGE, seed=0, device="meta")
        engine = spread(
            LossModule(model),
            model=model,
            units=units(model),
            layout=Layout(engine="fsdp2", shard=world.size),
            world=world,
            build_optimizer=partial(build_optimizer, spec=OptimizerSpec()),
            weights=Reading(model, spec=spec, seed=0, device=world.device),
        )
    parameters: Any = engine.model.parameters()
    peak.shard_mb = sum(each.to_local().nbytes for each in parameters) / _MB
    return peak


def _load_whole(folder: Path) -> Peak:
    import torch
    from transformers import AutoModelForImageTextToText

    _import_model(folder)
    with _peak() as peak:
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    assert all(each.dtype == torch.float32 for each in model.parameters())
    return peak


def _import_model(folder: Path) -> None:
    """Import what a model needs, so that it is not measured."""
    from diptych.model.weights import read_config

    spec = ModelSpec(weights=str(folder))
    from diptych.model.streaming import outline

    outline(read_config(spec), attention={})


@contextmanager
def _peak() -> Iterator[Peak]:
    """Sample private memory meanwhile."""
    gc.collect()
    found = Peak()
    before, done = _private_mb(), threading.Event()

    def sample() -> None:
        while not done.wait(0.001):
            found.peak_mb = max(found.peak_mb, _private_mb() - before)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        found.peak_mb = max(found.peak_mb, _private_mb() - before)


def _private_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024 / _MB
    raise AssertionError("Linux tells a process' private memory")
