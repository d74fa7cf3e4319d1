"""Promise 2: every layout follows the single process, with ranks that have no image at all.

`tests/parallel/matrix.py` says which cells there are; those of the table write `docs/same_loss.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest

from diptych.core.records import Layout
from tests.parallel.matrix import (
    AXES,
    COLUMNS,
    CONTRASTS,
    LAYOUTS,
    MODELS,
    SCHEDULES,
    Cell,
    make_cell,
    make_pairs,
    pairs_that_can_run,
    table_cell,
    table_places,
)
from tests.parallel.table import TABLE, Deviation, Table, cells_of
from tests.runs import make_spec, trajectory

NUM_STEPS = 20
PAIR_STEPS = 10
"""Fewer, for `make test`; the table's cells train `NUM_STEPS`."""
PAIRS = make_pairs()
IN_FLOAT64 = {
    "ddp": make_cell("", engine="ddp", **{"micro-batches": "several"}),
    "fsdp2": make_cell("", engine="fsdp2 twice"),
    "fsdp2 that recomputes": make_cell(
        "", engine="fsdp2 twice", recompute="blocks", loss="chunked", model="untied"
    ),
    "ddp that contrasts": make_cell(
        "", engine="ddp", schedule="pack, contrast", **{"micro-batches": "several"}
    ),
    "fsdp2 that contrasts": make_cell(
        "", engine="fsdp2 twice", recompute="blocks", schedule="pack, contrast"
    ),
}


@dataclass(frozen=True)
class Trained:
    """What rank 0 says of a run: [steps] losses, the whole first gradient, and counts."""

    losses: np.ndarray
    gradient: np.ndarray
    imageless: int
    skipped: int
    lengths: set[int]


@pytest.fixture(scope="module")
def train(ranks, corpus) -> Callable[..., Trained]:
    def run(cell: Cell, *, layout: Layout | None = None, **arguments) -> Trained:
        layout = layout or cell.layout
        spec = make_spec(
            corpus,
            layout=layout,
            model=MODELS[cell.model],
            schedule=SCHEDULES[cell.schedule],
            identity={"contrast": CONTRASTS.get(cell.schedule)},
        )
        arguments = {"num_steps": NUM_STEPS, **arguments}
        found = ranks(layout.world_size).run(trajectory, spec=spec, **arguments)
        return Trained(**found[0])

    return run


@pytest.fixture(scope="module")
def reference(train) -> Callable[..., Trained]:
    """Call with a cell to get the single process that it has to follow; each is trained once."""
    known: dict[tuple[str, str, int], Trained] = {}

    def get(cell: Cell, *, num_steps: int = NUM_STEPS) -> Trained:
        key = (cell.model, cell.schedule, num_steps)
        if key not in known:
            known[key] = train(cell, layout=cell.reference, num_steps=num_steps)
            losses = known[key].losses
            # The losses must move, or they would agree for a model that learns nothing.
            assert losses[-1] < (0.95 if num_steps == NUM_STEPS else 0.98) * losses[0]
        return known[key]

    return get


def follow(found: Trained, reference: Trained, *, cell: Cell) -> Deviation:
    """Hold a run against the single process; return by how much it deviates."""
    assert found.skipped == 0
    assert not {length % cell.layout.memory.token_multiple for length in found.lengths} - {0}
    gradient = float(
        np.linalg.norm(found.gradient - reference.gradient) / np.linalg.norm(reference.gradient)
    )
    loss = float(np.abs(found.losses / reference.losses - 1).max())
    if cell.rounds:
        assert loss <= 2e-2
        # If nothing were rounded, the layout would not compute in the dtype that it names.
        assert loss > 0
    else:
        assert gradient <= 1e-6
        assert loss <= 1e-4
    return Deviation(loss=loss, gradient=gradient)


@pytest.mark.parametrize("cell", PAIRS, ids=lambda cell: cell.name)
def test_same_loss(cell, train, reference):
    few = {"num_steps": PAIR_STEPS}
    follow(train(cell, **few), reference(cell, **few), cell=cell)


def test_every_two_values_meet_in_one_of_these():
    met = {
        pair
        for cell in PAIRS
        for pair in combinations(zip(AXES, cell.name.split(" | "), strict=True), 2)
    }
    assert not set(pairs_that_can_run()) - met
    assert not [cell.name for cell in PAIRS if cell.refused]


@pytest.fixture(scope="module")
def table(request):
    table = Table()
    yield table
    if request.config.getoption("--write-tables"):
        table.write()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "column"),
    [
        pytest.param(layout, column, marks=() if is_sampled else pytest.mark.exhaustive)
        for layout, column, is_sampled in table_places()
    ],
)
def test_same_loss_in_every_cell(layout, column, train, reference, table):
    cell = table_cell(layout, column)
    if cell.refused is None:
        table.add(layout, column, follow(train(cell), reference(cell), cell=cell))


def test_the_table_has_just_these_cells():
    listed = cells_of(TABLE.read_text(encoding="utf-8"))
    expected = {
        (layout, column): table_cell(layout, column).refused
        for layout in LAYOUTS
        for column in COLUMNS
    }
    assert listed.keys() == expected.keys()
    for place, found in listed.items():
        refused = expected[place]
        assert found.refused == refused, f"{place}: write the table anew, see its last lines"


@pytest.mark.parametrize("name", IN_FLOAT64)
def test_same_gradient_in_float64(name, train):
    cell = IN_FLOAT64[name]
    one = {"num_steps": 1, "dtype": "float64"}
    reference = train(cell, layout=cell.reference, **one)
    found = train(cell, **one)
    difference = np.linalg.norm(found.gradient - reference.gradient)
    assert difference <= 1e-12 * np.linalg.norm(reference.gradient)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2 twice", "zero 2", "zero 3"])
def test_a_gradient_that_is_a_thousandth_too_large_is_found(engine, train, reference):
    """AdamW hides a gradient's scale from the losses: the gradient itself has to be looked at."""
    cell = make_cell("", engine=engine)
    found = train(cell, num_steps=1, gradient_factor=1.001)
    whole = reference(cell, num_steps=PAIR_STEPS)
    first = Trained(whole.losses[:1], whole.gradient, imageless=0, skipped=0, lengths=set())
    with pytest.raises(AssertionError, match=r"0\.00\d+ <= 1e-06"):
        follow(found, first, cell=cell)


@pytest.mark.parametrize(
    ("num_ranks", "num_steps"), [("2 ranks", NUM_STEPS), ("2 x 2 ranks", PAIR_STEPS)]
)
def test_ranks_without_an_image_are_among_them(train, num_ranks, num_steps):
    assert train(
        make_cell("", engine="fsdp2 twice", ranks=num_ranks), num_steps=num_steps
    ).imageless
