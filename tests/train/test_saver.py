"""Saves beside training, saves that fail, what is kept, what is refused."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from diptych.core.errors import FormatError, RunError, VersionError
from diptych.monitor.run_folder import RunFolder, StepLog
from diptych.parallel import storage, writing
from diptych.train.retention import Keep
from tests.train.faults import ALONE, Weights, after, checkpoints, disk, record


def _steps(folder: Path) -> list[int]:
    return [storage.step_of(path) for path in storage.list_checkpoints(folder / "checkpoints")]


def _tell(ours, *, step_s: float = 0.1) -> None:
    """What the loop does in a step of one rank."""
    ours.observe(np.array([ours.share]), step_s=step_s)


@pytest.fixture
def held(monkeypatch):
    """A disk whose first write waits until it is let go."""
    begun, go = threading.Event(), threading.Event()
    write = os.write

    class Slow:
        def __getattr__(self, name):
            return getattr(os, name)

        def write(self, descriptor, data):
            begun.set()
            assert go.wait(30)
            return write(descriptor, data)

    monkeypatch.setattr(writing, "os", Slow())
    return begun, go


def test_training_goes_on_while_a_state_is_written_and_does_not_get_into_it(held, tmp_path):
    begun, go = held
    engine = Weights()
    ours = checkpoints(tmp_path, engine=engine)
    engine.step()
    ours.save(after(1))
    assert begun.wait(30)
    _tell(ours)
    engine.step()
    assert ours.share[0] == 1.0
    assert _steps(tmp_path) == []
    go.set()
    ours._saver._written.result(30)
    _tell(ours)
    ours._saver._sealed.result(30)
    assert _steps(tmp_path) == [1]
    weights = storage.read_weights(tmp_path / "checkpoints" / "step-00000001")
    assert torch.equal(weights["weight"], torch.arange(24.0).reshape(4, 6) + 1)
    ours.close()


def test_a_save_that_waits_is_complete_on_return(tmp_path):
    ours = checkpoints(tmp_path, engine=Weights(), saving="sync")
    ours.save(after(1))
    assert _steps(tmp_path) == [1]
    ours.close()


def test_without_room_for_a_copy_a_save_is_waited_for(tmp_path, caplog):
    engine = Weights()
    ours = checkpoints(tmp_path, engine=engine)
    ours._saver._room = lambda: 24 * 4 + 24 * 2 - 1
    ours.save(after(1))
    # It is written, and training may change what it was made of.
    engine.step()
    ours._saver.finish()
    assert "144 B are needed, 143 B are free" in caplog.text
    weights = storage.read_weights(tmp_path / "checkpoints" / "step-00000001")
    assert torch.equal(weights["weight"], torch.arange(24.0).reshape(4, 6))
    caplog.clear()
    ours._saver._room = lambda: 24 * 4 + 24 * 2
    ours.save(after(2))
    # What is held already needs no room.
    ours._saver._room = lambda: 0
    ours.save(after(3))
    ours.conclude(after(3))
    assert caplog.text == ""
    ours.close()


def test_the_next_save_waits_for_the_one_under_way(held, tmp_path):
    _, go = held
    ours = checkpoints(tmp_path, engine=Weights())
    ours.save(after(1))
    threading.Timer(0.2, go.set).start()
    ours.save(after(2))
    assert 1 in _steps(tmp_path)
    ours.conclude(after(2))
    assert _steps(tmp_path) == [1, 2]
    ours.close()


@pytest.mark.parametrize("saving", ["async", "sync"])
def test_a_save_without_room_is_counted_and_the_next_one_succeeds(saving, tmp_path, caplog):
    engine = Weights()
    ours = checkpoints(tmp_path, engine=engine, saving=saving)
    ours.save(after(1), wait=True)
    with disk(at=6, kind="ENOSPC", forever=True):
        ours.save(after(2))
        ours._saver.finish()
    assert (ours.num_failed, _steps(tmp_path)) == (1, [1])
    assert "No space left on device" in caplog.text
    ours.save(after(3))
    ours.conclude(after(3))
    assert (ours.num_failed, _steps(tmp_path)) == (1, [1, 3])
    ours.close()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "step-00000001",
        "step-00000003",
    }


def test_a_run_does_not_end_without_its_last_state(tmp_path):
    ours = checkpoints(tmp_path, engine=Weights())
    ours.save(after(1), wait=True)
    with (
        disk(at=1, kind="EROFS", forever=True),
        pytest.raises(RunError, match="step 2 could not be written") as caught,
    ):
        ours.conclude(after(2))
    assert "goes on from the newest checkpoint" in str(caught.value)
    assert _steps(tmp_path) == [1]
    ours.close()


def test_a_seal_that_fails_leaves_the_earlier_ones_and_is_made_good_at_the_end(tmp_path):
    ours = checkpoints(tmp_path, engine=Weights(), saving="sync")
    ours.save(after(1))
    with disk() as count:
        ours.save(after(2))
    # The rename is followed by one operation that is counted: the folder's own sync.
    with disk(at=count.count - 3, kind="EIO"):
        ours.save(after(3))
    assert (ours.num_failed, _steps(tmp_path)) == (1, [1, 2])
    ours.conclude(after(3))
    assert _steps(tmp_path) == [2, 3]
    ours.close()


def _save_on_two(folder: Path, *, saving: str) -> tuple[int, list[int], str | None]:
    """Save on two ranks; the second one's disk fails in the second save."""
    import torch.distributed as dist

    from diptych.parallel.mesh import World, gather_numbers

    world = World(rank=dist.get_rank(), size=2, device=torch.device("cpu"))
    ours = checkpoints(folder, engine=Weights(), saving=saving, keep=Keep(last=5), world=world)

    def tell() -> None:
        ours.observe(gather_numbers(ours.share, world=world), step_s=0.1)

    for step in range(1, 4):
        fails = step == 2 and world.rank == 1
        with disk(at=2 if fails else None, kind="EIO"):
            ours.save(after(step))
            if ours._saver._written is not None:
                ours._saver._written.exception(30)
        tell()
        tell()
    ours.conclude(after(3))
    ours.close()
    return ours.num_failed, _steps(folder), ours._saver.saved


@pytest.mark.parametrize("saving", ["async", "sync"])
def test_a_rank_s_failure_is_every_rank_s(saving, ranks, tmp_path):
    results = ranks(2).run(_save_on_two, folder=tmp_path, saving=saving)
    assert results == [(1, [1, 3], "step-00000003")] * 2
    names = sorted(path.name for path in (tmp_path / "checkpoints/step-00000003").iterdir())
    assert names == [
        "checksums.json",
        "shard-00001-of-00002.safetensors",
        "shard-00002-of-00002.safetensors",
        "state.json",
    ]


def test_the_last_the_first_of_every_so_many_and_the_best_are_kept(tmp_path):
    keep = Keep(last=2, every_steps=10, best="heldout_loss")
    ours = checkpoints(tmp_path, engine=Weights(), saving="sync", keep=keep)
    for step, loss in ((4, 3.0), (8, 0.5), (12, 2.0), (16, 1.0), (21, 0.9), (25, 0.8), (29, None)):
        ours.note(record(step, heldout_loss=loss))
        ours.save(after(step))
    # 12 and 21 are the first at or after 10 and 20, 8 is the best, 25 and 29 are the last two.
    assert _steps(tmp_path) == [8, 12, 21, 25, 29]
    ours.close()


def test_weights_alone_are_saved_to_share_and_stay(tmp_path):
    ours = checkpoints(tmp_path, engine=Weights(), saving="sync", keep=Keep(last=1))
    for step in (1, 2, 3):
        ours.save_weights(after(step))
        ours.save(after(step))
    assert _steps(tmp_path) == [3]
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("weights-*"))
    assert names == ["weights-00000001", "weights-00000002", "weights-00000003"]
    weights = storage.read_weights(tmp_path / "checkpoints" / names[0])
    assert list(weights) == ["weight"]
    assert torch.equal(weights["weight"], Weights().held["model.weight"])
    # A run resumes from a whole state only.
    assert checkpoints(tmp_path, engine=Weights()).restore()[0].step == 3
    ours.close()


def test_weights_alone_do_not_stand_for_the_last_state(tmp_path):
    ours = checkpoints(tmp_path, engine=Weights(), saving="sync")
    ours.save_weights(after(3))
    ours.conclude(after(3))
    assert _steps(tmp_path) == [3]
    ours.close()


def test_logs_are_in_a_checkpoint_and_come_back_where_they_were_lost(tmp_path):
    folder = RunFolder(tmp_path)
    log = StepLog(folder.steps)
    folder.append_attempt({"from_step": 0})
    ours = checkpoints(tmp_path, engine=Weights(), saving="sync")
    for step in (1, 2):
        log.write(record(step))
    ours.save(after(2))
    log.write(record(3))
    log.close()
    checkpoints(tmp_path, engine=Weights()).restore()
    assert [each.step for each in folder.read_steps()] == [1, 2, 3]
    folder.steps.unlink()
    folder.attempts.write_text("")
    checkpoints(tmp_path, engine=Weights()).restore()
    assert [each.step for each in folder.read_steps()] == [1, 2]
    assert folder.read_attempts() == [{"attempt": 0, "from_step": 0}]
    ours.close()


def test_a_step_log_without_room_keeps_its_records_until_there_is_some(tmp_path, caplog):
    log = StepLog(tmp_path / "steps.jsonl")
    log.write(record(1))
    write = log._file.write

    def full(text):
        raise OSError(errno.ENOSPC, "No space left on device")

    log._file.write = full
    log.write(record(2))
    log.write(record(3))
    assert caplog.text.count("No space left on device") == 1
    log._file.write = write
    log.write(record(4))
    log.close()
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


def _saved(tmp_path: Path) -> Path:
    ours = checkpoints(tmp_path, engine=Weights(), saving="sync")
    ours.save(after(1))
    ours.save(after(2))
    ours.close()
    return tmp_path / "checkpoints" / "step-00000002"


def _flip(path: Path, *, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a missing shard": (lambda f: next(f.glob("shard-*")).unlink(), "shard-.* is missing"),
    "a flipped byte": (lambda f: _flip(next(f.glob("shard-*"))), "is damaged"),
    "a flipped byte in a header": (lambda f: _flip(next(f.glob("shard-*")), at=40), "is damaged"),
    "a changed state": (lambda f: _flip(f / "state.json", at=5), "state.json is damaged"),
    "no state": (lambda f: (f / "state.json").unlink(), "state.json is missing"),
    "one more file": (lambda f: (f / ".metadata").write_bytes(b"x"), "does not belong there"),
    "a link for a shard": (
        lambda f: _link(next(f.glob("shard-*"))),
        "is damaged",
    ),
    "checksums that are none": (lambda f: (f / "checksums.json").write_text("{"), "no readable"),
}


def _link(path: Path) -> None:
    target = path.parent.parent / "elsewhere"
    path.rename(target)
    path.symlink_to(target)


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_passed_over(name, tmp_path, caplog):
    damage, words = DAMAGE[name]
    folder = _saved(tmp_path)
    damage(folder)
    with pytest.raises(FormatError, match=words):
        storage.verify(folder)
    engine = Weights()
    state, _ = checkpoints(tmp_path, engine=engine).restore()
    assert state.step == 1
    assert torch.equal(engine.held["model.weight"], Weights().held["model.weight"])
    assert "passing over a checkpoint" in caplog.text


def test_a_newer_format_is_refused_and_stays(tmp_path):
    folder = _saved(tmp_path)
    state = json.loads((folder / "state.json").read_text())
    _reseal(folder, state={**state, "version": 3})
    with pytest.raises(VersionError, match=r"format version 3\. .*versions 1 to 2"):
        checkpoints(tmp_path, engine=Weights()).restore()
    assert folder.is_dir()


def test_a_damaged_checkpoint_is_neither_counted_nor_replaced(tmp_path):
    """It is put aside: what is kept are sound ones, and its bytes stay for a person to look at."""
    folder = _saved(tmp_path)
    shard = next(folder.glob("shard-*"))
    _flip(shard)
    ours = checkpoints(tmp_path, engine=Weights())
    assert ours.restore()[0].step == 1
    aside = folder.with_name("damaged-00000002-1")
    assert (aside / shard.name).is_file()
    assert ours.passed_over == [
        f"passed over {folder.name}: The checkpoint file {folder.name}/{shard.name} is damaged; "
        f"it is kept as {aside.name}"
    ]
    ours.save(after(2), wait=True)
    ours.save(after(3), wait=True)
    assert {2, 3} <= set(_steps(tmp_path))
    storage.verify(folder)
    assert (aside / shard.name).is_file()


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path):
    folder = _saved(tmp_path)
    before = storage.list_checkpoints(folder.parent)
    for path in before:
        _flip(next(path.glob("shard-*")))
    with pytest.raises(FormatError, match="No checkpoint of this run is sound: step-00000002: The"):
        checkpoints(tmp_path, engine=Weights()).restore()
    assert storage.list_checkpoints(folder.parent) == before


@pytest.mark.parametrize("name", ["loader", "num_updates", "identity_sha256"])
def test_a_state_that_lacks_something_is_refused_by_its_name(tmp_path, name):
    folder = _saved(tmp_path)
    state = json.loads((folder / "state.json").read_text())
    del state[name]
    _reseal(folder, state=state)
    with pytest.raises(FormatError, match=f"state of step-00000002 has no {name}"):
        checkpoints(tmp_path, engine=Weights()).restore()


def test_a_link_to_a_checkpoint_is_removed_without_what_it_leads_to(tmp_path):
    target = tmp_path / "elsewhere"
    target.mkdir()
    link = tmp_path / "step-00000002"
    link.symlink_to(target)
    writing.discard(link)
    assert list(tmp_path.iterdir()) == [target]


def _reseal(folder: Path, *, state: dict) -> None:
    """Write a state with the checksum that belongs to it."""
    (folder / "state.json").write_text(json.dumps(state))
    sums = json.loads((folder / "checksums.json").read_text())
    sums["state.json"] = writing.xxh3_bytes((folder / "state.json").read_bytes())
    (folder / "checksums.json").write_text(json.dumps(sums))


def test_another_run_and_another_model_are_refused_before_anything_is_loaded(tmp_path):
    _saved(tmp_path)
    engine = Weights()
    with pytest.raises(FormatError, match="belongs to another run"):
        checkpoints(tmp_path, engine=engine, identity="theirs").restore()
    other = Weights()
    other.held["model.weight"] = torch.full((4, 5), 7.0)
    other.held["model.bias"] = torch.full((4,), 7.0)
    with pytest.raises(FormatError) as caught:
        checkpoints(tmp_path, engine=other).restore()
    assert "model.bias is missing" in str(caught.value)
    assert "model.weight is [4, 6], the model has [4, 5]" in str(caught.value)
    assert all((other.held[name] == 7).all() for name in ("model.weight", "model.bias"))


def test_what_a_save_left_half_is_removed(tmp_path):
    _saved(tmp_path)
    left = tmp_path / "checkpoints" / ".step-00000003.partial-0"
    left.mkdir()
    (left / "shard-00001-of-00001.safetensors").write_bytes(b"half")
    assert checkpoints(tmp_path, engine=Weights(), world=ALONE).restore()[0].step == 2
    assert not left.exists()
