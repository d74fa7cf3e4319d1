"""A small model for tests of engines, and steps of it on real ranks.

It has what is awkward to cut: odd sizes, a tied embedding, a frozen layer, one element.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import torch
from torch import nn

from diptych.core.records import (
    Layout,
    MixedPrecision,
    OptimizerOffload,
    OptimizerSpec,
    ZeroOptions,
)
from diptych.parallel.mesh import World

STAGES = [1, 2, 3]
SPEC = OptimizerSpec(lr=1e-2, max_grad_norm=0.5)
ROWS, WORDS = 8, 50
CPU = OptimizerOffload(to="cpu", adam="torch")


class Toy(nn.Module):
    """Returns its summed loss, and the same without gradient, as `LossModule` does."""

    def __init__(self, *, width: int = 17, inner: int = 33, freeze: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(WORDS, width)
        self.up = nn.Linear(width, inner)
        self.norm = nn.LayerNorm(inner)
        self.down = nn.Linear(inner, width)
        self.narrow = nn.Linear(width, 1)
        self.gain = nn.Parameter(torch.tensor([0.5]))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed_tokens.weight
        for parameter in self.up.parameters() if freeze else ():
            parameter.requires_grad_(False)

    def forward(self, words_BS, targets_BS):
        hidden = self.embed_tokens(words_BS)
        hidden = hidden + self.gain * self.down(self.norm(torch.relu(self.up(hidden))))
        logits = self.head(hidden + torch.tanh(self.narrow(hidden))).float()
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets_BS.flatten(), reduction="sum"
        )
        return loss, loss.detach()[None]


def zero(stage, *, ranks=2, precision="fp32", mixed=None, **options):
    return Layout(
        engine="zero",
        shard=ranks,
        precision=precision,
        zero=ZeroOptions(stage=stage, **options),
        mixed_precision=mixed or MixedPrecision(),
    )


def batches_of(num_steps):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, WORDS, (num_steps, 2, ROWS, 7), generator=generator)


def train_plainly(num_steps, *, precision="fp32"):
    """Train without any engine: torch's AdamW, clipping and nothing else."""
    from diptych.train.optimizers import build_optimizer

    model = Toy()
    optimizer = build_optimizer(model, spec=SPEC)
    losses, norms = [], []
    for words, targets in batches_of(num_steps):
        loss, _ = model(words, targets)
        (loss / words.numel()).backward()
        trained = [each for each in model.parameters() if each.requires_grad]
        norms.append(float(nn.utils.clip_grad_norm_(trained, SPEC.max_grad_norm)))
        for group in optimizer.param_groups:
            group["lr"] = SPEC.lr
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()) / words.numel())
    weights = {name: each.detach().clone() for name, each in model.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights}


def engine_of(layout, *, ema_decay=None, **model):
    import torch.distributed as dist

    from diptych.parallel.spread import spread
    from diptych.train.optimizers import build_optimizer

    toy = Toy(**model)
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    engine = spread(
        toy,
        model=toy,
        units=[],
        layout=layout,
        world=world,
        build_optimizer=partial(build_optimizer, spec=SPEC, ema_decay=ema_decay),
    )
    return engine, world


def step(engine, world, batch, *, num_micro_batches=1, poison=None):
    """Run a step on this rank's rows; `poison` multiplies the first micro-batch's loss."""
    words, targets = (each.chunk(world.size)[world.rank] for each in batch)
    total = 0.0
    micro_batches = list(
        zip(words.chunk(num_micro_batches), targets.chunk(num_micro_batches), strict=True)
    )
    for number, (these, those) in enumerate(micro_batches, start=1):
        with engine.micro_batch(is_last=number == len(micro_batches)):
            loss, _ = engine.module(these, those)
            factor = poison if poison is not None and number == 1 else 1.0
            engine.backward(loss * factor, weight=1 / batch[0].numel())
        total += float(loss.detach())
    return total, engine.update(lr=SPEC.lr, max_grad_norm=SPEC.max_grad_norm)


def close(engine):
    if hasattr(engine, "close"):
        engine.close()


def whole(tensors, world):
    """Put the ranks' shards together with an object gather, by no code of the engine's."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    found = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            found[name] = tensor.detach().clone()
            continue
        parts = [None] * world.size
        dist.all_gather_object(parts, tensor.to_local())
        found[name] = torch.cat([each.reshape(-1, *tensor.shape[1:]) for each in parts])
        assert found[name].shape == tensor.shape
    return found


def train(layout, num_steps, *, micro_batches=(1,), **model):
    """Train; between steps a forward pass without gradient, as held-out data does."""
    from diptych.parallel.mesh import gather_numbers

    engine, world = engine_of(layout, **model)
    engine.module.train()
    losses, norms, scales = [], [], []
    for number, batch in enumerate(batches_of(num_steps)):
        num = micro_batches[number % len(micro_batches)]
        total, update = step(engine, world, batch, num_micro_batches=num)
        assert update.applied or update.loss_scale is not None
        losses.append(gather_numbers([total], world=world).sum() / batch[0].numel())
        norms.append(update.grad_norm)
        scales.append(update.loss_scale)
        engine.module.eval()
        with torch.no_grad():
            engine.module(*(each.chunk(world.size)[world.rank] for each in batch))
        engine.module.train()
    tensors = whole(engine.tensors(), world)
    close(engine)
    return {"losses": losses, "norms": norms, "tensors": tensors, "scales": scales}


def compile_kernel(name):
    """Compile what DeepSpeed compiles on first use, before ranks have to: it takes minutes."""
    command = f"from deepspeed.ops import op_builder; op_builder.{name}().load()"
    subprocess.run(
        [sys.executable, "-c", command],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "MAX_JOBS": "2"},
        check=True,
        capture_output=True,
        timeout=1500,
    )
