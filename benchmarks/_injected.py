"""A rank of a real training with something wrong in it: `_injected.py SCENARIO train FOLDER LOGS`.

SCENARIO is the file that `write` leaves. What it says is put in the place of functions of the
worker's modules, before the worker begins; the sources know nothing of it. Kinds that need devices
have no place here.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LIMIT_S = 1200.0


def write(
    path: Path,
    *,
    kind: str,
    strength: float,
    step_s: float,
    num_steps: int,
    seed: int,
    per_step: dict[str, float],
) -> None:
    """Say what is wrong with the ranks that read this file.

    Args:
        path: the file.
        kind: of the scenario.
        strength: a share of `step_s`, or what the kind takes for it.
        step_s: a healthy step's seconds.
        num_steps: of the run.
        seed: of the scenario.
        per_step: how many `micro_batches`, `images` and `patches` a rank has in a step.
    """
    facts = {
        "kind": kind,
        "strength": strength,
        "step_s": step_s,
        "num_steps": num_steps,
        "seed": seed,
        **per_step,
    }
    path.write_text(json.dumps(facts), encoding="utf-8")


def start_ranks(
    scenario: Path, *, folder: Path, logs: Path, env: dict[str, str], num_ranks: int
) -> None:
    """Train a run's folder with ranks that all read the scenario, to its end.

    Raises:
        RuntimeError: a rank failed or hangs; says where they have printed why.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    command = [sys.executable, __file__, str(scenario), "train", str(folder), str(logs)]
    ranks = [
        subprocess.Popen(
            command, env={**env, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(num_ranks)
    ]
    end = time.monotonic() + _LIMIT_S
    try:
        codes = [rank.wait(timeout=max(1.0, end - time.monotonic())) for rank in ranks]
    except subprocess.TimeoutExpired:
        codes = [-1]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}; {logs} has what they printed")


def inject(facts: dict[str, Any], *, rank: int) -> None:
    """Put what is wrong in the place of what is right."""
    lost_s = float(facts["strength"]) * float(facts["step_s"])
    kinds: dict[str, Callable[[], None]] = {
        "healthy": lambda: None,
        "slow_decode": lambda: _slow_decode(lost_s / facts["images"]),
        "straggler": lambda: _straggler(lost_s / facts["micro_batches"], here=rank == 1),
        "slow_all_reduce": lambda: _slow_all_reduce(lost_s),
        "slow_disk": lambda: _slow_disk(lost_s),
        "vision_load": lambda: _vision_load(lost_s / facts["patches"]),
        "nan": lambda: _nan(facts, here=rank == 0),
    }
    kinds[facts["kind"]]()


def _slow_decode(image_s: float) -> None:
    from diptych.data import batcher

    plain = batcher.decode

    def decode(*arguments: Any, **options: Any) -> Any:
        time.sleep(image_s)
        return plain(*arguments, **options)

    batcher.decode = decode


def _before_forward(act: Callable[[dict[str, Any]], None]) -> None:
    from diptych.train.step import LossModule

    plain = LossModule.forward

    @functools.wraps(plain)
    def forward(self: Any, **inputs: Any) -> Any:
        if self.training:
            act(inputs)
        return plain(self, **inputs)

    LossModule.forward = forward


def _straggler(forward_s: float, *, here: bool) -> None:
    if here:
        _before_forward(lambda inputs: time.sleep(forward_s))


def _slow_all_reduce(exchange_s: float) -> None:
    """Have DDP's gradients come back late, without keeping anyone from computing meanwhile."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from diptych.parallel import ddp

    def late(state, bucket):  # torch refuses annotations that it does not know
        gradient = bucket.buffer().div_(dist.get_world_size())
        future = dist.all_reduce(gradient, async_op=True).get_future()

        def wait(done: Any) -> Any:
            if bucket.is_last():
                time.sleep(exchange_s)
            return done.value()[0]

        return future.then(wait)

    plain = ddp.Replicas._register

    def register(self: Any, module: DistributedDataParallel) -> None:
        plain(self, module)
        module.register_comm_hook(None, late)

    ddp.Replicas._register = register


def _slow_disk(save_s: float) -> None:
    from diptych.train import saver

    plain = saver.write_part

    def write_part(*arguments: Any, **options: Any) -> Any:
        time.sleep(save_s)
        return plain(*arguments, **options)

    saver.write_part = write_part


def _vision_load(patch_s: float) -> None:
    """Deal rows out by size, all large ones to one rank, which changes; patches take longer."""
    from diptych.data.schedule import assign

    def deal(unit_costs: Any, *, order: Any, num_ranks: int, capacity: int) -> list[list[int]]:
        first = random.Random(float(unit_costs.sum())).randrange(num_ranks)
        hands = [
            order[begin : begin + capacity].tolist() for begin in range(0, len(order), capacity)
        ]
        hands += [[] for _ in range(num_ranks - len(hands))]
        return [hands[(rank + first) % num_ranks] for rank in range(num_ranks)]

    assign._deal = deal
    _before_forward(lambda inputs: time.sleep(patch_s * len(inputs["pixel_values"])))


def _nan(facts: dict[str, Any], *, here: bool) -> None:
    """Make the loss of some micro-batches NaN, as a broken sample would."""
    from diptych.train.step import LossModule

    num = facts["num_steps"]
    chosen = random.Random(facts["seed"]).sample(range(5, num), round(facts["strength"]))
    hit = {step * facts["micro_batches"] for step in chosen}
    calls = itertools.count()
    plain = LossModule.forward

    @functools.wraps(plain)
    def forward(self: Any, **inputs: Any) -> Any:
        losses = plain(self, **inputs)
        is_hit = self.training and next(calls) in hit
        return tuple(each * float("nan") for each in losses) if is_hit else losses

    if here:
        LossModule.forward = forward


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    inject(given, rank=int(os.environ["RANK"]))
    from diptych.worker import main

    main(sys.argv[2:])
