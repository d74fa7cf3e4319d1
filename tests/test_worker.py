"""The entry of a rank, in processes of its own."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import time
from pathlib import Path

import pytest

from diptych.core.records import Layout
from diptych.monitor.run_folder import RunFolder
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec

LIMIT_S = 60


def _fail_in_a_step(folder: Path, *, rank: int, port: int) -> None:
    """Run a rank; the first fails with an exchange under way that the second is not yet at."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    from diptych import worker
    from diptych.parallel import mesh

    def train_run(run: RunFolder, *, spec: object, world: mesh.World) -> None:
        mesh.barrier()
        if world.rank == 1:
            time.sleep(2 * LIMIT_S)
        mesh.begin_gather([1.0], world=world)
        raise ConnectionError("a planned fault")

    worker.train_run = train_run
    worker.run_training(folder)


@pytest.mark.slow
def test_a_rank_that_fails_waits_for_no_other(corpus, tmp_path) -> None:
    folder = RunFolder(tmp_path)
    layout = Layout(engine="ddp", dp=2, micro_batch=4)
    spec = make_spec(corpus, layout=layout, model=TINY_MODEL, schedule=TINY_SCHEDULE)
    folder.write_spec(spec)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    ranks = [
        context.Process(
            target=_fail_in_a_step, args=(tmp_path,), kwargs={"rank": rank, "port": port}
        )
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    try:
        ranks[0].join(LIMIT_S)
        assert ranks[0].exitcode == 1
        assert ranks[1].is_alive()
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
