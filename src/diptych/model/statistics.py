"""Which modules of a model keep statistics of the batches they see: a model in, their names out.

What they compute depends on the rows of one micro-batch, so it is not the same for every layout.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm | _InstanceNorm]:
    """Find batch norms, and instance norms that keep running statistics, by full name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        or (isinstance(module, _InstanceNorm) and module.track_running_stats)
    }
