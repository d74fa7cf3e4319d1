"""Checkpoints of other trainers, written on real ranks by DeepSpeed's and torch's own functions.

Every function returns the weights that the checkpoint has to give back, by their plain names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def tiny(seed: int = 0) -> Any:
    """Make transformers' tiny Qwen3-VL, the same on every rank; its embedding and head are tied."""
    from transformers import AutoModelForImageTextToText

    from diptych.model.families import torch_side
    from tests.conftest import TINY_MODEL

    config = torch_side("qwen3_vl").config_of(
        TINY_MODEL.sizes, tie_word_embeddings=True, tokens=None
    )
    torch.manual_seed(seed)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


def write_config(folder: Path) -> None:
    tiny().config.save_pretrained(folder)


def write_deepspeed(
    folder: Path, *, stage: int, dtype: str = "fp32", frozen: bool = False
) -> dict[str, torch.Tensor]:
    """Train one step with DeepSpeed, in two groups, and have it save; returns its fp32 weights."""
    from diptych.core.records import Layout
    from diptych.parallel import zero_runtime
    from diptych.parallel.mesh import World

    model = tiny()
    if frozen:
        model.model.visual.requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in trained if each.ndim > 1]},
        {"params": [each for each in trained if each.ndim < 2], "weight_decay": 0.3},
    ]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    size = dist.get_world_size()
    layout = Layout.model_validate(
        {"engine": "zero", "shard": size, "micro_batch": 1, "zero": {"stage": max(1, stage)}}
    )
    engine = zero_runtime.start(
        model,
        optimizer=torch.optim.AdamW(groups, lr=1e-2),
        config=config,
        layout=layout,
        world=World(rank=dist.get_rank(), size=size, device=torch.device("cpu")),
    )
    ids = torch.arange(1, 9).view(1, 8) + dist.get_rank()
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.save_checkpoint(str(folder), tag="global_step1")
    found = {name: _whole(each, stage=stage) for name, each in engine.module.named_parameters()}
    zero_runtime.stop(engine)
    return found


def _whole(parameter: Any, *, stage: int) -> torch.Tensor:
    """Return what the optimizer updates: fp32 where it keeps that beside the weight."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    if stage and parameter.requires_grad:
        return safe_get_full_fp32_param(parameter).detach().clone()
    partitioned = [parameter] if hasattr(parameter, "ds_id") else []
    with deepspeed.zero.GatheredParameters(partitioned):
        return parameter.detach().clone()


def write_distributed(folder: Path, *, below: str = "") -> dict[str, torch.Tensor]:
    """Shard a model with FSDP2, update it, and save it with its optimizer as torch does."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = tiny()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.language_model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(1, 9).view(1, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    states = {below: weights} if below else weights
    dcp.save({**states, "optim": moments, "step": torch.tensor(1)}, checkpoint_id=folder)
    return {name: each.full_tensor() for name, each in weights.items()}


def write_fsdp1(folder: Path) -> dict[str, torch.Tensor]:
    """Shard a model with FSDP1, and save its whole state dict and its sharded one."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        ShardedStateDictConfig,
        StateDictType,
    )

    model = FullyShardedDataParallel(tiny(), device_id=torch.device("cpu"), use_orig_params=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        whole = {name: each.clone() for name, each in model.state_dict().items()}
    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()
    ):
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "sharded")
    if dist.get_rank() == 0:
        torch.save(whole, folder / "pytorch_model.bin")
    return whole
