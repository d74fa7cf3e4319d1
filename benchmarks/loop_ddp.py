"""What our loop adds to a step on two ranks that replicate the weights, beside plain DDP.

Peers: a plain PyTorch loop over `DistributedDataParallel` (the floor), the Hugging Face Trainer,
which wraps the model itself. How they are measured: `_spread`.
"""

from __future__ import annotations

import argparse

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from _spread import WORLD_SIZE, measure_loops
from diptych.core.records import Layout
from loop import MeanLoss
from run import Measured


def measure(options: argparse.Namespace) -> Measured:
    """Measure with DDP."""
    return measure_loops(Layout(engine="ddp", dp=WORLD_SIZE), wrap=replicate)


def replicate(module: MeanLoss) -> nn.Module:
    """Wrap in DDP, with the settings that are our defaults."""
    return DistributedDataParallel(module, gradient_as_bucket_view=True, forward_sync_buffers=False)


if __name__ == "__main__":
    from run import main

    main(["loop_ddp"])
