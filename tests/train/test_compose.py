from __future__ import annotations

import pytest
from pydantic import ValidationError

from diptych.core.errors import ConfigError
from diptych.core.records import (
    Cluster,
    ContrastSpec,
    Device,
    Layout,
    LoraSpec,
    MemoryOptions,
    ModelSpec,
    OptimizerSpec,
    Plan,
    Prediction,
    RawSamples,
    RawSource,
    RunSpec,
    ScheduleSpec,
    TowerRates,
)
from diptych.train.compose import Folders, TrainParams, compose, threads_per_rank
from tests.conftest import TINY_MODEL, TINY_PACKS


def _plan(*, layout, num_cores=2):
    device = Device(kind="cpu", name="test", memory_bytes=2**30, flops_per_s={})
    cluster = Cluster(
        num_nodes=1,
        num_devices_per_node=1,
        device=device,
        num_cores_per_node=num_cores,
        host_memory_bytes=2**30,
    )
    prediction = Prediction(layout=layout, held_bytes=1, peak_bytes=2, step_s=None)
    return Plan(cluster=cluster, global_batch=8, predictions=(prediction,))


SINGLE = Layout()
NO_RAW = RawSamples(sources=())
FOLDERS = {
    "sample_index": "i",
    "shards": "s",
    "manifest": "m",
    "processor": "p",
    "sample_costs": "c",
    "runs": "r",
    "release": "e",
    "stages": "t",
}


def _compose(corpus, *, layout=SINGLE, model=TINY_MODEL, raw_samples=NO_RAW, **train):
    return compose(
        _plan(layout=layout),
        raw_samples,
        corpus.manifest,
        corpus.processor,
        corpus.buckets,
        model,
        TrainParams(num_steps=60, **train),
        Folders(**FOLDERS),
    )


def test_placement_never_changes_the_run_s_name(corpus):
    one = _compose(corpus)
    other = _compose(corpus, layout=Layout(engine="fsdp2", shard=2), checkpoint_every_steps=7)
    assert one.run_id == other.run_id
    assert one.placement != other.placement


def test_what_decides_the_weights_changes_it(corpus):
    names = {
        _compose(corpus).run_id,
        _compose(corpus, seed=1).run_id,
        _compose(corpus, optimizer=OptimizerSpec(lr=3e-4)).run_id,
    }
    assert len(names) == 3


def test_a_model_that_contradicts_its_processor_is_refused(corpus):
    sizes = {**TINY_MODEL.sizes, "vision": {**TINY_MODEL.sizes["vision"], "patch_size": 14}}
    model = TINY_MODEL.model_copy(update={"sizes": sizes})
    with pytest.raises(ConfigError, match="patch_size is 14, the processor's is 8"):
        _compose(corpus, model=model)


def test_a_model_of_another_family_than_the_processor_is_refused(corpus):
    model = ModelSpec(family="llava")
    with pytest.raises(ConfigError, match="of the family 'qwen3_vl', the model of 'llava'"):
        _compose(corpus, model=model)


def test_a_warm_up_longer_than_the_run_is_refused():
    TrainParams(num_steps=50, optimizer=OptimizerSpec(warmup_steps=50))
    with pytest.raises(ValidationError, match="warmup_steps is 51 and num_steps is 50"):
        TrainParams(num_steps=50, optimizer=OptimizerSpec(warmup_steps=51))


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "threads"), [(2, 1, 2), (2, 2, 1), (2, 4, 1), (16, 4, 4)]
)
def test_ranks_never_oversubscribe_the_cores(num_cores, num_ranks, threads):
    layout = Layout(dp=num_ranks)
    assert threads_per_rank(_plan(layout=layout, num_cores=num_cores), layout=layout) == threads


def _raw(name, *, repeat):
    return RawSource(name=name, kind="llava", root=".", images=".", parts=(), repeat=repeat)


def test_sources_bring_their_repeats_unless_training_says_otherwise(corpus):
    raw = RawSamples(sources=(_raw("a", repeat=2.0), _raw("b", repeat=0.5), _raw("c", repeat=1.0)))
    spec = _compose(corpus, raw_samples=raw, schedule=ScheduleSpec(repeats={"b": 3.0}))
    assert spec.identity.schedule.repeats == {"a": 2.0, "b": 3.0}
    weights = {"a": 0.5, "b": 0.5}
    spec = _compose(corpus, raw_samples=raw, schedule=ScheduleSpec(weights=weights))
    assert (spec.identity.schedule.repeats, spec.identity.schedule.weights) == ({}, weights)


@pytest.mark.parametrize(
    "changed",
    [
        {"ema_decay": 0.999},
        {"label_smoothing": 0.1},
        {"schedule": TINY_PACKS, "contrast": ContrastSpec()},
        {"optimizer": OptimizerSpec(kind="muon")},
        {"optimizer": OptimizerSpec(towers={"vision": TowerRates(lr=1e-5)})},
        {"optimizer": OptimizerSpec(lr_schedule="linear")},
        {"model": TINY_MODEL.model_copy(update={"freeze": ("model.visual.blocks.0.*",)})},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_trains_and_how_is_part_of_the_run_s_name(corpus, changed):
    plain = {"schedule": changed["schedule"]} if "schedule" in changed else {}
    assert _compose(corpus, **changed).run_id != _compose(corpus, **plain).run_id


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ema_decay": 1.0}, "less than 1"),
        ({"ema_decay": 0.0}, "greater than 0"),
        ({"label_smoothing": 1.0}, "less than 1"),
        ({"label_smoothing": -0.1}, "greater than or equal to 0"),
        (
            {"contrast": ContrastSpec()},
            "contrast is set and schedule.mode is bucket.*set schedule.mode to pack",
        ),
        (
            {"optimizer": OptimizerSpec(lr_schedule="wsd", decay_steps=60, warmup_steps=0)},
            "decay_steps is 60, warmup_steps is 0 and num_steps is 50",
        ),
        (
            {"optimizer": OptimizerSpec(lr_schedule="wsd", decay_steps=11, warmup_steps=40)},
            "warm-up and fall cannot be longer than the run: lower optimizer.decay_steps",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        TrainParams(num_steps=50, **settings)


def test_a_fused_loss_that_would_not_smooth_labels_is_refused(corpus):
    layout = Layout(device="cuda", memory=MemoryOptions(loss="fused"))
    with pytest.raises(ConfigError, match=r"label_smoothing is 0.1.*loss to chunked"):
        _compose(corpus, layout=layout, label_smoothing=0.1)
    assert _compose(corpus, layout=layout).identity.label_smoothing == 0.0


VISION = ("vision", "connector")


@pytest.mark.parametrize(
    ("freeze", "adapted", "features", "starts"),
    [
        (VISION, None, None, False),
        (VISION, ("language",), None, False),
        (VISION, ("vision",), None, True),
        (("vision", "language"), None, None, True),
        # The connector still trains, and reads features as it read the tower's.
        (("vision",), None, "features", True),
        (VISION, None, "features", False),
    ],
)
def test_images_that_nothing_learns_from_are_not_contrasted(
    corpus, freeze, adapted, features, starts
):
    lora = LoraSpec(towers=adapted) if adapted else None
    given = {
        "model": TINY_MODEL.model_copy(update={"freeze": freeze, "lora": lora}),
        "schedule": TINY_PACKS,
        "vision_features": features,
    }
    _compose(corpus, **given)
    if starts:
        assert _compose(corpus, **given, contrast=ContrastSpec()).identity.contrast
    else:
        with pytest.raises(ConfigError, match=r"freeze names vision and connector.*to null"):
            _compose(corpus, **given, contrast=ContrastSpec())


def test_what_was_written_before_there_was_contrast_is_read(corpus):
    spec = _compose(corpus)
    former = spec.model_dump(mode="json")
    del former["identity"]["contrast"]
    assert RunSpec.model_validate(former) == spec


def test_features_need_a_frozen_tower(corpus):
    with pytest.raises(ConfigError, match=r"but that tower trains.*freeze to \[vision\]"):
        _compose(corpus, vision_features="features")
    frozen = TINY_MODEL.model_copy(update={"freeze": ("vision",)})
    spec = _compose(corpus, model=frozen, vision_features="features")
    assert spec.placement.vision_features == "features"
    other = ModelSpec(family="qwen2_5_vl", weights="weights", freeze=("vision",))
    with pytest.raises(ConfigError, match=r"of the family 'qwen2_5_vl'.*Built for qwen3_vl"):
        _compose(corpus, model=other, vision_features="features")


def test_sizes_left_out_are_compared_with_the_processor_too(corpus):
    """transformers: a patch of 16 px and a merge of 2; the corpus's processor has 8 and 2."""
    vision = {"depth": 1, "deepstack_visual_indexes": [], "temporal_patch_size": 1}
    model = ModelSpec(sizes={"vision": vision | {"patch_size": 8}})
    assert _compose(corpus, model=model).identity.model == model
    with pytest.raises(ConfigError, match="patch_size is 16, the processor's is 8"):
        _compose(corpus, model=ModelSpec(sizes={"vision": vision}))


def test_a_model_of_which_nothing_trains_is_refused(corpus):
    frozen = TINY_MODEL.model_copy(update={"freeze": ("vision", "connector", "language")})
    with pytest.raises(ConfigError, match="hardly a weight would train"):
        _compose(corpus, model=frozen)


def test_a_url_with_a_password_is_refused_without_repeating_it():
    with pytest.raises(ValidationError) as caught:
        TrainParams(shards_url="s3://someone:s3cret@bucket/shards")
    message = caught.value.errors()[0]["msg"]
    assert "must hold no user, password" in message
    assert "s3cret" not in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repeats": {"a": -1.0}}, "'repeats' has -1.0 for 'a'"),
        ({"weights": {"a": float("inf")}}, "'weights' has inf for 'a'"),
        ({"repeats": {"a": 2.0}, "weights": {"a": 1.0}}, "keep one of them"),
    ],
)
def test_a_mix_that_cannot_be_is_refused_at_once(settings, message):
    with pytest.raises(ValidationError, match=message):
        ScheduleSpec(**settings)


def _on(kind="slurm", **settings):
    return {"launch": {"kind": kind, **settings}}


def test_nodes_are_those_of_the_settings_or_of_the_plan(corpus):
    layout = Layout(engine="fsdp2", shard=4)
    assert _compose(corpus, layout=layout).placement.launch.num_nodes == 1
    there = _compose(corpus, layout=layout, **_on(num_nodes=2)).placement
    assert (there.launch.kind, there.launch.num_nodes) == ("slurm", 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (_on("local", num_nodes=2), "kind is local, which is this machine, and the run is for 2"),
        (_on(num_nodes=3), "4 ranks cannot be shared evenly by 3 nodes"),
        (_on(num_nodes=2, min_nodes=3), "min_nodes is 3, and the run is for 2 nodes"),
    ],
)
def test_nodes_that_cannot_be_are_refused(corpus, settings, message):
    with pytest.raises(ConfigError, match=message):
        _compose(corpus, layout=Layout(engine="fsdp2", shard=4), **settings)


def test_where_ranks_start_never_changes_the_run_s_name(corpus):
    layout = Layout(engine="fsdp2", shard=4)
    assert _compose(corpus, layout=layout).run_id == (
        _compose(corpus, layout=layout, **_on("ray", num_nodes=2)).run_id
    )
