"""Promise 3 across layouts: what one has saved, another loads to the last bit and goes on from.

`tests/parallel/reshard.py` says which layouts there are. Run with the slow cells, this writes a
table of `docs/resume.md`.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tests.parallel.reshard import (
    LAYOUTS,
    LOW,
    REFERENCE,
    in_parts,
    load,
    relative,
    save,
    train_through,
)
from tests.resume_table import RESHARD_TABLE, Table, short

RING = (
    "one process",
    "hsdp, 2 copies of 2 ranks",
    "fsdp2, 4 ranks",
    "zero 3, 2 ranks",
    "fsdp2, 2 ranks",
    "zero 1, 2 ranks",
    "ddp, 4 ranks",
    "zero 2 on the host, 2 ranks",
    "ddp, 2 ranks",
    "one process",
)
"""Each is loaded by the next: ZeRO by FSDP2 and back, HSDP by full shard, 4, 2 and 1 ranks."""
LOW_PAIRS = (
    *pairwise((REFERENCE, *LOW, "ddp, 2 ranks, fp16")),
    ("zero 3, 2 ranks, bf16", REFERENCE),
)
"""Their states are fp32 all the same."""
EVERY = {**LAYOUTS, **LOW}


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Call with a layout's name to get its checkpoint, and how it went on itself."""
    known = {}

    def get(name):
        if name not in known:
            layout = EVERY[name]
            folder = tmp_path_factory.mktemp("saved") / "step-00000003"
            went = ranks(layout.world_size).run(save, layout=layout, folder=folder)[0]
            known[name] = folder, went
        return known[name]

    return get


@pytest.fixture(scope="module")
def through(ranks):
    """The single process that nothing ended."""
    return ranks(1).run(train_through)[0]


@pytest.fixture(scope="module")
def table(request):
    found = Table(RESHARD_TABLE)
    yield found
    if request.config.getoption("--write-tables"):
        found.write()


def test_the_run_to_be_followed_moves(through):
    """Else every layout would follow it, whatever it forgot."""
    assert relative(through.ended.weights, through.begun.weights) > 1e-3


@pytest.mark.parametrize(("before", "after"), list(pairwise(RING)))
def test_another_layout_goes_on(before, after, saved, through, ranks):
    folder, went = saved(before)
    layout = LAYOUTS[after]
    found = ranks(layout.world_size).run(load, layout=layout, folders={before: folder})[0]
    follow(found[before], went, through=through, is_same=False)


@pytest.mark.slow
@pytest.mark.parametrize("after", LAYOUTS)
def test_every_layout_goes_on_from_every_other(after, saved, through, ranks, table):
    layout = LAYOUTS[after]
    checkpoints = {before: saved(before) for before in LAYOUTS}
    for folders in in_parts({before: folder for before, (folder, _) in checkpoints.items()}):
        found = ranks(layout.world_size).run(load, layout=layout, folders=folders)[0]
        for before, went in found.items():
            is_same = before == after
            worst = follow(went, checkpoints[before][1], through=through, is_same=is_same)
            table.add(before, after, short(worst) + (", bitwise" if is_same else ""))


def follow(found, went, *, through, is_same):
    """Hold what was loaded against what was saved and against one process; return the worst."""
    assert found.begun.digests == went.begun.digests
    if is_same:
        assert found.ended.digests == went.ended.digests
        assert found.losses == went.losses
    worst = max(
        relative(found.gradient, through.gradient),
        relative(found.ended.weights, through.ended.weights),
    )
    assert worst <= 1e-6
    return worst


@pytest.mark.parametrize(("before", "after"), LOW_PAIRS)
def test_in_lower_precision_too(before, after, saved, ranks):
    folder, went = saved(before)
    layout = EVERY[after]
    found = ranks(layout.world_size).run(load, layout=layout, folders={before: folder})[0][before]
    assert found.begun.digests == went.begun.digests
    np.testing.assert_allclose(found.losses, went.losses, rtol=2e-2)
    if EVERY[before].is_fp16 and layout.is_fp16:
        assert found.engine == went.engine != {}


def test_the_table_has_just_these_cells():
    listed = Table(RESHARD_TABLE).listed()
    assert listed.keys() == {(before, after) for before in LAYOUTS for after in LAYOUTS}
    for (before, after), cell in listed.items():
        worst, _, rest = cell.partition(", ")
        assert float(worst) <= 1e-6
        assert rest == ("bitwise" if before == after else "")
