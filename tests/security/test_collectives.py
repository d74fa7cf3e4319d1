"""What ranks send each other: numbers, never objects, which the other side would unpickle."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diptych.core.records import Layout
from diptych.monitor.run_folder import RunFolder
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec, train_rank
from tests.security.canary import Bomb, Canary


def watched(act: Callable[..., Any], arguments: dict[str, Any]) -> list[str]:
    """Do something on this rank; return who unpickled what another rank had sent.

    Every collective of objects, torch's own and those of its checkpoints, ends in one function.
    """
    from torch.distributed import distributed_c10d

    original, callers = distributed_c10d._tensor_to_object, []

    def unpickle(*args: Any, **options: Any) -> Any:
        callers.append(" < ".join(frame.name for frame in traceback.extract_stack()[-5:-1]))
        return original(*args, **options)

    distributed_c10d._tensor_to_object = unpickle
    try:
        act(**arguments)
    finally:
        distributed_c10d._tensor_to_object = original
    return callers


def send_bomb(path: Path) -> None:
    import torch.distributed as dist

    sent = [Bomb(path) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(sent, src=0)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_ranks_send_no_objects(
    canary: Canary, corpus: Any, ranks: Any, tmp_path: Path, engine: Any
) -> None:
    bomb = {"act": send_bomb, "arguments": {"path": canary.trace}}
    canary.proves(lambda: canary.shows(any(ranks(2).run(watched, **bomb))))
    sharded = {"dp": 2} if engine == "ddp" else {"shard": 2}
    spec = make_spec(
        corpus,
        layout=Layout(engine=engine, micro_batch=4, **sharded),
        model=TINY_MODEL,
        schedule=TINY_SCHEDULE,
        num_steps=4,
    )
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.write_spec(spec)
    saved = {"act": train_rank, "arguments": {"folder": folder.path, "stop_at": 2}}
    resumed = {"act": train_rank, "arguments": {"folder": folder.path}}
    callers = [
        caller
        for each in (saved, resumed)
        for found in ranks(2).run(watched, **each)
        for caller in found
    ]
    assert len(list(folder.checkpoints.glob("step-*"))) == 2
    assert callers == []
