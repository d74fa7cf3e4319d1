"""What our loop adds to a step on two ranks that share the weights out, beside plain FSDP2.

Peers: a plain PyTorch loop over `fully_shard` (the floor), the Hugging Face Trainer over the same
module. How they are measured: `_spread`.
"""

from __future__ import annotations

import argparse

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from _spread import WORLD_SIZE, measure_loops
from diptych.core.records import Layout
from diptych.model.families import units
from loop import MeanLoss
from run import Measured


def measure(options: argparse.Namespace) -> Measured:
    """Measure with FSDP2."""
    return measure_loops(Layout(engine="fsdp2", shard=WORLD_SIZE), wrap=shard)


def shard(module: MeanLoss) -> nn.Module:
    """Shard the same blocks as ours, then the rest."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for unit in units(module.stamped.module.model):
        if unit.is_block:
            fully_shard(unit.module, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


if __name__ == "__main__":
    from run import main

    main(["loop_fsdp"])
