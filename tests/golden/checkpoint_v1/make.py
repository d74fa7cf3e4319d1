"""Checkpoints of format version 1: how they were made, and how a run goes on from them.

In: code whose `storage.VERSION` is 1. Out: `fp32/` and `fp16/`, each a run's folder, and
`expected.json`. `go_on` is also what a test does with them, whatever version its code writes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from diptych.core.records import Layout
from tests.parallel.zero_toy import batches_of, close, engine_of, step, whole

FOLDER = Path(__file__).parent
LAYOUTS = {
    "fp32": Layout(),
    "fp16": Layout.model_validate(
        {
            "precision": "fp16",
            "mixed_precision": {"loss_scale": {"initial": 1024.0, "growth_interval": 3}},
        }
    ),
}
NUM_STEPS, NUM_MORE = 4, 2
SKIPPED = 1
MASKED = ("digits/00003", "digits/00007")
IDENTITY, SCHEDULE = "1" * 64, "2" * 64


def make(folder: Path, *, name: str) -> dict[str, Any]:
    """Train and save; return what is expected of whoever goes on. Rank 0 of 1 calls it."""
    from diptych.parallel import storage
    from diptych.train.checkpoints import note_masked_keys
    from diptych.train.loop import TrainState

    assert storage.VERSION == 1, "these checkpoints show what version 1 was"
    engine, world = _engine(name)
    for number, batch in enumerate(batches_of(NUM_STEPS + NUM_MORE)[:NUM_STEPS]):
        poison = float("inf") if number == SKIPPED else None
        assert step(engine, world, batch, poison=poison)[1].applied == (poison is None)
    note_masked_keys(folder, rank=0, step=2, keys=MASKED)
    state = TrainState(
        step=NUM_STEPS,
        epoch=1,
        first_step=3,
        num_masked=len(MASKED),
        skipped_steps=[SKIPPED],
    )
    _checkpoints(folder, engine, world).save(state)
    found = _what_is_seen(engine, world)
    close(engine)
    return found


def go_on(folder: Path, *, name: str) -> dict[str, Any]:
    """Restore, and train on; return the same as `make`, and the states that were restored."""
    engine, world = _engine(name)
    # Another state than a fresh engine's, so that what is not loaded shows.
    step(engine, world, batches_of(1)[0].flip(0))
    state, loader = _checkpoints(folder, engine, world).restore()
    states = {
        "num_masked": state.num_masked,
        "num_updates": state.num_updates,
        "loader": loader.model_dump(mode="json"),
    }
    found = {**_what_is_seen(engine, world), **states}
    close(engine)
    return found


def _engine(name: str) -> Any:
    return engine_of(LAYOUTS[name], ema_decay=0.9, width=5, inner=7)


def _checkpoints(folder: Path, engine: Any, world: Any) -> Any:
    from diptych.train.checkpoints import Checkpoints
    from diptych.train.retention import Keep

    return Checkpoints(
        folder / "checkpoints",
        engine=engine,
        identity_sha256=IDENTITY,
        schedule_sha256=SCHEDULE,
        keep=Keep(last=1),
        saving="sync",
        world=world,
    )


def _what_is_seen(engine: Any, world: Any) -> dict[str, Any]:
    """Hash every tensor, ask for the engine's state, and train on."""
    tensors = {
        name: {"shape": list(tensor.shape), "sha256": _sha256(tensor)}
        for name, tensor in whole(engine.tensors(), world).items()
    }
    state = engine.state()
    following = [
        step(engine, world, batch) for batch in batches_of(NUM_STEPS + NUM_MORE)[NUM_STEPS:]
    ]
    return {
        "tensors": tensors,
        "engine": state,
        "losses": [loss for loss, _ in following],
        "grad_norms": [update.grad_norm for _, update in following],
    }


def _sha256(tensor: Any) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def main() -> None:
    """Write the folders and `expected.json` on one rank."""
    from tests.ranks import RankPool

    pool = RankPool(1)
    expected = {}
    for name in LAYOUTS:
        (FOLDER / name).mkdir()
        (expected[name],) = pool.run(make, folder=FOLDER / name, name=name)
    pool.close()
    text = json.dumps(expected, indent=1)
    (FOLDER / "expected.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
