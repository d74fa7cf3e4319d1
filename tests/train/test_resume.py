"""Promise 3: a run that ended early and was started again is the run that went through.

`tests/train/resume.py` says how runs end and under which settings. Run with the slow cells, this
writes two tables of `docs/resume.md`.
"""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from diptych.monitor.run_folder import RunFolder
from diptych.parallel import storage
from tests.resume_table import ENDINGS_TABLE, SETTINGS_TABLE, Table
from tests.runs import make_spec
from tests.train.resume import (
    AT_EVERY_STEP_TOO,
    BORDER,
    ENDINGS,
    FAULTS,
    LAYOUTS,
    NOT_FINITE,
    NUM_STEPS,
    SAVED_EVERY,
    SETTINGS,
    CutOff,
    Kill,
    Setting,
    Stop,
    attempt,
)

PLAIN = {name: Setting(layout) for name, layout in LAYOUTS.items()}
NOT_RUN = "not run: a package is missing"
FAST_LAYOUTS = ("one process", "ddp, 2 ranks", "zero 2, 2 ranks")
FAST_SETTINGS = (
    "fp16, ddp",
    "mean of the weights (EMA), fsdp2",
    "packed rows, one process",
)
TIMES = {
    *("step_s", "data_s", "tokens_per_s", "attempt", "num_recompiles"),
    *("time_s", "phases_s", "memory_bytes"),
}


@pytest.fixture(scope="module")
def damaged(corpus, tmp_path_factory):
    """The corpus with one training sample's image overwritten, and that sample's key."""
    shards = tmp_path_factory.mktemp("damaged") / "shards"
    shutil.copytree(corpus.shards, shards)
    shard = next(shard for shard in corpus.manifest.shards if shard.split == "train")
    entries = pq.read_table(shards / shard.index_path).to_pylist()
    entry = next(entry for entry in entries if len(entry["offsets"]) > 1)
    with (shards / shard.path).open("r+b") as file:
        file.seek(entry["offsets"][0])
        file.write(b"\x00" * entry["lengths"][0])
    return replace(corpus, shards=shards), entry["key"]


@pytest.fixture(scope="module")
def run(ranks, damaged):
    """Call with a new folder, a setting and endings: trains to the end, with so many attempts."""

    def go(path, setting, *, endings=(), fault=""):
        folder = RunFolder(path)
        folder.path.mkdir(parents=True)
        folder.write_spec(_spec(damaged[0], setting))

        def start(**how):
            how["eagerly"] = setting.needs == "torchao"
            return ranks(setting.layout.world_size).run(attempt, folder=path, **how)[0]

        for ending in endings:
            match ending:
                case Stop(after):
                    assert start(stop_after=after, fault=fault) == after
                case Kill(within):
                    with pytest.raises(AssertionError, match="a planned fault"):
                        start(kill_within=within, fault=fault)
                case CutOff(after):
                    assert start(stop_after=after, fault=fault) == after
                    _cut_off_a_save(folder, step=after + SAVED_EVERY)
        assert start(fault=fault) == NUM_STEPS
        return folder

    return go


def _spec(corpus, setting):
    spec = make_spec(
        corpus,
        layout=setting.layout,
        model=setting.model,
        schedule=setting.schedule,
        num_steps=NUM_STEPS,
        checkpoint_every_steps=SAVED_EVERY,
        identity=setting.identity,
        **setting.optimizer,
    )
    placement = spec.placement.model_copy(
        update={"keep_checkpoints": NUM_STEPS, **setting.placement}
    )
    return spec.model_copy(update={"placement": placement})


def _cut_off_a_save(folder, *, step):
    """Leave what a save leaves that ends in the middle of a file."""
    newest = storage.list_checkpoints(folder.checkpoints)[-1]
    partial = folder.checkpoints / f".step-{step:08d}.partial"
    partial.mkdir()
    for path in newest.glob("*.safetensors"):
        data = path.read_bytes()
        (partial / path.name).write_bytes(data[: len(data) // 2])
        (partial / f"other-{path.name}").write_bytes(data)


@pytest.fixture(scope="module")
def through(run, damaged, tmp_path_factory):
    """Call with a setting to get the run that nothing ended; each is trained once."""
    known: dict[str, RunFolder] = {}

    def get(name: str, setting: Setting) -> RunFolder:
        if name not in known:
            folder = run(tmp_path_factory.mktemp("through") / "run", setting)
            _check_what_happened(folder, key=damaged[1])
            known[name] = folder
        return known[name]

    return get


def _check_what_happened(folder, *, key):
    """Ask whether all that a resume could get wrong was in the run."""
    records = folder.read_steps()
    assert records[NOT_FINITE - 1].skipped
    assert not records[-1].skipped
    # Once in each epoch, for each begins anew.
    assert records[-1].epoch >= 1
    masked = [record.num_masked for record in records]
    assert masked[-1] > masked[0] or masked[0]
    losses = [record.loss for record in records if record.loss is not None]
    assert len(set(losses)) == len(losses) >= NUM_STEPS - 8
    state = storage.read_state(folder.checkpoints / f"step-{NUM_STEPS:08d}")
    assert state["loader"]["masked_keys"] == [key]
    assert NOT_FINITE - 1 in state["loader"]["skipped_steps"]


def seen(folder) -> dict[str, Any]:
    """Say all that a run has left: records but for times, every tensor's bytes, the rest."""
    last = folder.checkpoints / f"step-{NUM_STEPS:08d}"
    state = storage.read_state(last)
    tensors = {
        f"{path.relative_to(last)}: {name}": tensor
        for path in sorted(last.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    return {
        "records": [record.model_dump(exclude=TIMES) for record in folder.read_steps()],
        "tensors": tensors,
        **{part: state[part] for part in ("loader", "num_updates", "num_masked", "engine")},
    }


def hold_equal(folder, whole, *, num_endings):
    """Compare two runs to the last bit."""
    assert folder.read_run().num_attempts == num_endings + 1
    found, expected = seen(folder), seen(whole)
    for one, other in zip(found.pop("records"), expected.pop("records"), strict=True):
        assert one == other
    tensors, others = found.pop("tensors"), expected.pop("tensors")
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert np.array_equal(tensor.view(np.uint8), others[name].view(np.uint8)), name
    assert found == expected


def _marked(name, *, fast):
    return pytest.param(name, marks=() if name in fast else pytest.mark.slow, id=name)


@pytest.fixture(scope="module")
def tables(request):
    found = Table(ENDINGS_TABLE), Table(SETTINGS_TABLE)
    for layout in LAYOUTS.keys() - set(AT_EVERY_STEP_TOO):
        found[0].add(layout, "stopped after every step", "")
    yield found
    if request.config.getoption("--write-tables"):
        for each in found:
            each.write()


@pytest.mark.parametrize("layout", [_marked(name, fast=FAST_LAYOUTS) for name in LAYOUTS])
def test_endings_in_turn(layout, run, through, tables, tmp_path):
    check_endings("stopped and killed in turn", layout, run, through, tables, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", AT_EVERY_STEP_TOO)
def test_stopped_after_every_step(layout, run, through, tables, tmp_path):
    check_endings("stopped after every step", layout, run, through, tables, tmp_path)


def check_endings(ending, layout, run, through, tables, tmp_path):
    """Hold a plain run that ended so against the one that went through."""
    setting, endings = PLAIN[layout], ENDINGS[ending]
    folder = run(tmp_path / "run", setting, endings=endings)
    hold_equal(folder, through(layout, setting), num_endings=len(endings))
    tables[0].add(layout, ending, "bitwise")


@pytest.mark.parametrize("name", [_marked(name, fast=FAST_SETTINGS) for name in SETTINGS])
def test_endings_under_other_settings(name, run, through, tables, tmp_path):
    setting = SETTINGS[name]
    if setting.needs and importlib.util.find_spec(setting.needs) is None:
        tables[1].add(name, "resumed", NOT_RUN)
        pytest.skip(f"{setting.needs} is not installed")
    folder = run(tmp_path / "run", setting, endings=setting.endings)
    hold_equal(folder, through(name, setting), num_endings=len(setting.endings))
    tables[1].add(name, "resumed", "bitwise")
    if setting.layout.is_fp16:
        skipped = [record.skipped for record in folder.read_steps()]
        assert sum(skipped[: NOT_FINITE - 1]) > 0, "the loss scale was not searched for"


@pytest.mark.parametrize(
    "fault", [_marked(fault, fast=("the loader's state is not restored",)) for fault in FAULTS]
)
def test_a_resume_that_forgets_something_is_found(fault, run, through, tmp_path):
    name = "fp16, ddp" if "scale" in fault else "one process"
    setting = {**PLAIN, **SETTINGS}[name]
    whole = through(name, setting)
    folder = run(tmp_path / "run", setting, endings=(Stop(BORDER - 2),), fault=fault)
    with pytest.raises(AssertionError):
        hold_equal(folder, whole, num_endings=1)


def test_the_tables_have_just_these_cells():
    listed = Table(ENDINGS_TABLE).listed()
    for (layout, ending), cell in listed.items():
        is_run = ending != "stopped after every step" or layout in AT_EVERY_STEP_TOO
        assert cell == ("bitwise" if is_run else "")
    assert {layout for layout, _ in listed} == set(LAYOUTS)
    settings = Table(SETTINGS_TABLE).listed()
    assert [name for name, _ in settings] == list(SETTINGS)
    for (name, _), cell in settings.items():
        assert cell == "bitwise" or (SETTINGS[name].needs and cell == NOT_RUN)
