"""A fork of a run: the same run where nothing changed, a new one where something did."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch

from diptych.core.errors import ConfigError, FormatError
from diptych.core.hashing import sha256_file, sha256_json, xxh3_file
from diptych.core.records import Layout, MixedPrecision, Towers, TowerWeights, ZeroOptions
from diptych.monitor.run_folder import RunFolder
from diptych.parallel import storage
from diptych.train.forks import check_name, fork
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec, train_rank

NUM_STEPS = 12  # 80 samples in batches of 8: the second epoch begins at step 10
SINGLE = Layout(micro_batch=4)
DDP = Layout(engine="ddp", dp=2, micro_batch=4)
FSDP = Layout(engine="fsdp2", shard=2, micro_batch=2)
ZERO_2 = Layout(engine="zero", shard=2, micro_batch=4, zero=ZeroOptions(stage=2))
FP16 = Layout(
    engine="ddp",
    dp=2,
    micro_batch=4,
    precision="fp16",
    mixed_precision=MixedPrecision.model_validate(
        {"loss_scale": {"initial": 2.0**24, "growth_interval": 3}}
    ),
)


def _spec(corpus, *, layout=SINGLE, schedule=TINY_SCHEDULE, model=TINY_MODEL, **settings):
    settings = {"num_steps": NUM_STEPS, "checkpoint_every_steps": 3, **settings}
    settings.setdefault("heldout_every_steps", 0)
    return make_spec(corpus, layout=layout, model=model, schedule=schedule, **settings)


def _start(root, spec):
    folder = RunFolder(root / spec.run_id)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_spec(spec)
    return folder


def _train(root, spec, ranks, **options):
    folder = _start(root, spec)
    ranks(spec.placement.layout.world_size).run(train_rank, folder=folder.path, **options)
    return folder


@pytest.fixture(scope="module")
def parent(corpus, ranks, tmp_path_factory):
    """A finished run in a folder of runs, with an EMA, and its checkpoints."""
    root = tmp_path_factory.mktemp("runs")
    spec = _spec(corpus, identity={"ema_decay": 0.9})
    return _train(root, spec, ranks)


@pytest.fixture
def root(parent, tmp_path):
    """A folder of runs with a copy of the parent in it."""
    shutil.copytree(parent.path, tmp_path / parent.path.name)
    return tmp_path


def _tensors(folder, step):
    """Read every tensor of a checkpoint, moments and all."""
    place = folder.checkpoints / f"step-{step:08d}"
    return storage._read_whole(place, prefix="")


def _state(folder, step):
    return storage.read_state(folder.checkpoints / f"step-{step:08d}")


def _files(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.path.rglob("*"))}


def _name(parent, step):
    return f"{parent.path.name}@{step}"


def _fork(root, corpus, name, *, keeps="all", **settings):
    settings.setdefault("identity", {"ema_decay": 0.9})
    return fork(_spec(corpus, **settings), name, keeps, str(root))


@pytest.mark.parametrize("step", [6, pytest.param(9, marks=pytest.mark.slow)])
def test_a_fork_without_a_change_is_bitwise_its_parent(step, parent, root, corpus, ranks):
    before = _files(RunFolder(root / parent.path.name))
    spec = _fork(root, corpus, _name(parent, step))
    assert spec.run_id != parent.path.name
    folder = _train(root, spec, ranks)
    assert _files(RunFolder(root / parent.path.name)) == before
    expected, found = _tensors(parent, NUM_STEPS), _tensors(folder, NUM_STEPS)
    assert expected.keys() == found.keys()
    assert any(name.endswith(".ema") for name in expected)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    theirs, ours = parent.read_steps(), folder.read_steps()
    assert [record.step for record in ours] == list(range(step + 1, NUM_STEPS + 1))
    assert [record.loss for record in ours] == [record.loss for record in theirs[step:]]
    run = folder.read_run()
    assert (run.num_steps, run.num_attempts) == (NUM_STEPS, 1)
    made = folder.read_spec().identity.parent
    sums = parent.checkpoints / f"step-{step:08d}" / "checksums.json"
    assert (made.run_id, made.step, made.sha256) == (parent.path.name, step, sha256_file(sums))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(FSDP, id="fsdp2", marks=pytest.mark.slow),
        pytest.param(FP16, id="ddp in fp16", marks=pytest.mark.slow),
        pytest.param(ZERO_2, id="zero 2", marks=pytest.mark.slow),
    ],
)
def test_every_engine_goes_on_as_its_parent(layout, corpus, ranks, tmp_path):
    """fp16: with the loss scale and the steps that it skipped."""
    whole = _train(tmp_path, _spec(corpus, layout=layout), ranks)
    spec = fork(_spec(corpus, layout=layout), f"{whole.path.name}@6", "all", str(tmp_path))
    folder = _train(tmp_path, spec, ranks)
    expected, found = _tensors(whole, NUM_STEPS), _tensors(folder, NUM_STEPS)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    for key in ("engine", "num_updates", "loader"):
        assert _state(folder, NUM_STEPS)[key] == _state(whole, NUM_STEPS)[key]


def test_a_fork_with_another_rate_is_another_run_and_resumes_itself(parent, root, corpus, ranks):
    settings = {"lr": 3e-4, "num_steps": 15}
    spec = _fork(root, corpus, f"{parent.path.name}@newest", **settings)
    assert spec.identity.parent.step == NUM_STEPS
    folder = _train(root, spec, ranks, stop_at=1)
    # Gone is the parent; the fork has a checkpoint of its own.
    for path in storage.list_checkpoints(RunFolder(root / parent.path.name).checkpoints)[-1:]:
        path.rename(path.with_name(".gone"))
    again = _fork(root, corpus, _name(parent, NUM_STEPS), **settings)
    assert again == spec
    _train(root, again, ranks)
    assert [record.step for record in folder.read_steps()] == [13, 14, 15]
    assert [attempt["from_step"] for attempt in folder.read_attempts()] == [12, 13]
    # The whole course, counted from the parent's first step: cosine from 3e-4 to a twentieth.
    assert folder.read_steps()[-1].lr < 0.1 * 3e-4
    unforked = _spec(corpus, identity={"ema_decay": 0.9}, **settings)
    assert len({spec.run_id, unforked.run_id, parent.path.name}) == 3


def test_another_schedule_begins_a_new_epoch(parent, root, corpus, ranks):
    schedule = TINY_SCHEDULE.model_copy(update={"seed": 5})
    spec = _fork(root, corpus, _name(parent, 6), schedule=schedule, num_steps=9)
    folder = _train(root, spec, ranks)
    state = _state(folder, 9)["loader"]
    assert (state["epoch"], state["first_step"], state["step"]) == (1, 6, 9)
    assert state["schedule_sha256"] != _state(parent, 6)["loader"]["schedule_sha256"]
    assert [record.epoch for record in folder.read_steps()] == [1] * 3


def test_weights_alone_begin_the_moments_anew(parent, root, corpus, ranks):
    spec = _fork(root, corpus, _name(parent, 6), keeps="weights", kind="muon", num_steps=8)
    folder = _train(root, spec, ranks, stop_at=1)
    state = _state(folder, 7)
    assert (state["loader"]["step"], state["num_updates"]) == (7, 1)
    _train(root, spec, ranks)
    assert _state(folder, 8)["num_updates"] == 2
    assert not any(name.endswith("momentum_buffer") for name in _tensors(parent, 6))


def test_fresh_moments_make_the_step_that_adamw_makes_first(parent, root, corpus, ranks):
    """Its first step is the rate times the gradient's sign, whatever the gradient's size."""
    spec = _fork(root, corpus, _name(parent, 6), keeps="weights", num_steps=7, weight_decay=0.0)
    folder = _train(root, spec, ranks)
    before, after = _tensors(parent, 6), _tensors(folder, 7)
    name = "model.model.language_model.layers.0.mlp.down_proj.weight"
    moved = (after[name] - before[name]).abs()
    assert moved.median() == pytest.approx(folder.read_steps()[0].lr, rel=1e-3)
    # The mean began with the weights: a tenth of that step.
    mean = after[name.replace("model.", "optimizer.", 1) + ".ema"] - before[name]
    assert mean.abs().median() == pytest.approx(0.1 * folder.read_steps()[0].lr, rel=1e-2)


@pytest.mark.slow
def test_a_mean_can_be_added_or_left_out(parent, root, corpus, ranks):
    without = _fork(root, corpus, _name(parent, 9), identity={}, num_steps=10)
    folder = _train(root, without, ranks)
    assert not any(name.endswith(".ema") for name in _tensors(folder, 10))
    spec = fork(
        _spec(corpus, identity={"ema_decay": 0.5}, num_steps=11),
        f"{folder.path.name}@10",
        "all",
        str(root),
    )
    added = _train(root, spec, ranks)
    before, after = _tensors(folder, 10), _tensors(added, 11)
    weight = "lm_head.weight" if "model.lm_head.weight" in after else None
    weight = weight or "model.language_model.embed_tokens.weight"
    half = (before[f"model.{weight}"] + after[f"model.{weight}"]) / 2
    torch.testing.assert_close(after[f"optimizer.{weight}.ema"], half)


def test_what_the_parent_masked_stays_masked(parent, root, corpus, ranks):
    name = parent.path.name
    state_file = root / name / "checkpoints" / "step-00000006" / "state.json"
    state = json.loads(state_file.read_text())
    state["loader"]["masked_keys"] = ["digits/1", "digits/2"]
    state_file.write_text(json.dumps(state))
    sums_file = state_file.with_name("checksums.json")
    sums = json.loads(sums_file.read_text())
    sums_file.write_text(json.dumps({**sums, "state.json": xxh3_file(state_file)}))
    folder = _train(root, _fork(root, corpus, _name(parent, 6), num_steps=7), ranks)
    assert _state(folder, 7)["loader"]["masked_keys"] == ["digits/1", "digits/2"]


def _other_model():
    sizes = {**TINY_MODEL.sizes, "text": {**TINY_MODEL.sizes["text"], "intermediate_size": 48}}
    return TINY_MODEL.model_copy(update={"sizes": sizes})


@pytest.mark.parametrize(
    ("step", "settings", "message"),
    [
        ("6", {"model": _other_model()}, r"down_proj.weight is \[32, 64\] in the parent and"),
        ("6", {"kind": "muon"}, "kind is muon, the parent's is adamw.*fork_keeps: weights"),
        ("12", {}, "begins at step 12, and train.num_steps is 12.*above 12"),
        ("7", {}, r"no complete checkpoint of step 7. Complete are the steps 3, 6, 9, 12"),
    ],
    ids=["model", "optimizer", "steps", "step"],
)
def test_what_does_not_fit_is_refused(step, settings, message, parent, root, corpus):
    with pytest.raises(ConfigError, match=message):
        _fork(root, corpus, _name(parent, step), **settings)


def test_a_run_that_is_not_there_is_refused_with_those_that_are(parent, root, corpus):
    message = rf"'0123456789ab'.*no such run.*{parent.path.name} \(steps 3, 6, 9, 12\)"
    with pytest.raises(ConfigError, match=message):
        _fork(root, corpus, "0123456789ab@3")
    with pytest.raises(ConfigError, match="There is no run yet"):
        _fork(root / "empty", corpus, "0123456789ab")


def test_what_trains_now_needs_moments(corpus, ranks, tmp_path):
    frozen = TINY_MODEL.model_copy(update={"freeze": ("vision",)})
    whole = _train(tmp_path, _spec(corpus, model=frozen, num_steps=3), ranks)
    name = f"{whole.path.name}@3"
    draft = _spec(corpus)
    with pytest.raises(ConfigError, match=r"no moments of weights that train now: model.visual"):
        fork(draft, name, "all", str(tmp_path))
    spec = fork(draft, name, "weights", str(tmp_path))
    _train(tmp_path, spec, ranks, stop_at=1)
    kept = {"vision_features": "features"}
    kept = draft.model_copy(update={"placement": draft.placement.model_copy(update=kept)})
    assert fork(kept, name, "weights", str(tmp_path)).placement.vision_features == "features"
    trained = _train(tmp_path, _spec(corpus, num_steps=3), ranks)
    with pytest.raises(ConfigError, match="the parent's tower may have others"):
        fork(kept, f"{trained.path.name}@3", "weights", str(tmp_path))
    # Frozen in a fork, or drawn from another seed: the checkpoint's tower is not the one at hand.
    forked = fork(_spec(corpus, model=frozen), f"{trained.path.name}@3", "all", str(tmp_path))
    again = _train(tmp_path, forked, ranks, stop_at=1)
    with pytest.raises(ConfigError, match="the parent's tower may have others"):
        fork(kept, f"{again.path.name}@4", "weights", str(tmp_path))
    # That fork has begun without features, and goes on with none.
    placement = {"vision_features": "features"}
    placed = _spec(corpus, model=frozen)
    placed = placed.model_copy(update={"placement": placed.placement.model_copy(update=placement)})
    with pytest.raises(ConfigError, match="the parent's tower may have others"):
        fork(placed, f"{trained.path.name}@3", "all", str(tmp_path))
    drawn = kept.identity.model_copy(update={"seed": 1})
    with pytest.raises(ConfigError, match="the parent's tower may have others"):
        fork(kept.model_copy(update={"identity": drawn}), name, "weights", str(tmp_path))


def test_a_processor_may_change_but_not_its_tokens(parent, root, corpus):
    draft = _spec(corpus, identity={"ema_decay": 0.9})
    other = draft.identity.model_copy(update={"processor_sha256": "f" * 64})
    draft = draft.model_copy(update={"identity": other, "vocabulary_sha256": "a" * 64})
    with pytest.raises(ConfigError, match="did not record which token has which id"):
        fork(draft, _name(parent, 6), "all", str(root))
    folder = RunFolder(root / parent.path.name)
    folder.write_spec(folder.read_spec().model_copy(update={"vocabulary_sha256": "b" * 64}))
    with pytest.raises(ConfigError, match="its tokens have other ids"):
        fork(draft, _name(parent, 6), "all", str(root))
    folder.write_spec(folder.read_spec().model_copy(update={"vocabulary_sha256": "a" * 64}))
    assert fork(draft, _name(parent, 6), "all", str(root)).identity.parent.step == 6


def test_a_damaged_or_partial_checkpoint_is_refused(parent, root, corpus, ranks):
    place = root / parent.path.name / "checkpoints"
    tensors = next((place / "step-00000006").glob("*.safetensors"))
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    with pytest.raises(FormatError, match=r"step-00000006/.*is damaged"):
        _fork(root, corpus, _name(parent, 6))
    (place / "step-00000009" / "checksums.json").unlink()
    with pytest.raises(ConfigError, match=r"of step 9. Complete are the steps 3, 6, 12"):
        _fork(root, corpus, _name(parent, 9))
    spec = _fork(root, corpus, _name(parent, 3))
    with (place / "step-00000003" / "checksums.json").open("a") as file:
        file.write(" ")
    with pytest.raises(AssertionError, match="gone or another than this run was forked from"):
        _train(root, spec, ranks)


def test_another_runs_checkpoint_is_refused(parent, root, corpus):
    other = _start(root, _spec(corpus, lr=5e-4))
    (root / parent.path.name / "checkpoints").rename(other.checkpoints)
    with pytest.raises(FormatError, match=f"is another run's \\({parent.path.name}"):
        _fork(root, corpus, f"{other.path.name}@6")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (None, None),
        ("0123456789ab@100", "0123456789ab@100"),
        ("0123456789ab.old-2@newest", "0123456789ab.old-2@newest"),
        (123, "000000000123"),  # as Kedro reads --params=train.fork_from=000000000123
    ],
)
def test_names_of_runs(given, name):
    assert check_name(given) == name


@pytest.mark.parametrize("given", ["train", "align@newest", "../x@3", "0123456789ab@", 1.5, True])
def test_what_is_no_run_is_refused(given):
    with pytest.raises(ValueError, match=re.escape(f"{given!r} is no run")):
        check_name(given)


def test_a_run_without_a_parent_keeps_its_name(corpus):
    spec = _spec(corpus)
    written = json.loads(spec.identity.model_dump_json())
    del written["parent"]
    # Nor does one without towers of its own, which came later.
    assert written["model"].pop("towers") is None
    assert spec.identity.sha256 == sha256_json(written)
    towers = Towers(vision=TowerWeights(weights="someone/tower"))
    model = spec.identity.model.model_copy(update={"towers": towers})
    other = spec.identity.model_copy(update={"model": model})
    assert other.sha256 != spec.identity.sha256
