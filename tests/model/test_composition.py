"""Compositions that begin with towers which transformers has saved alone."""

from __future__ import annotations

import json
import logging
from collections import Counter

import numpy as np
import pytest
import torch
import transformers
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from diptych.core.errors import ConfigError
from diptych.core.records import (
    FsdpOptions,
    Layout,
    LoraSpec,
    ModelSpec,
    TileSettings,
    TokenIds,
    ZeroOptions,
)
from diptych.model.assemble import build
from diptych.model.inspect import complete_sizes, inspect
from diptych.model.revision import pin

TOKENS = TokenIds(num_tokens=96, pad=0, eos=1, image=2)
IMAGE = TileSettings(side_px=32, patch_px=8, tile_tokens=16, placeholder="<image>", token="<image>")
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "layer_norm_eps": 1e-3,
}
TEXT = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "initializer_range": 0.2,
}
HALF = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
TOWER = "model.vision_tower."
PROJECTOR = "model.multi_modal_projector."


def _tower(kind):
    """Make a vision model that transformers has, alone or with the text tower that it learnt by."""
    family = kind.removesuffix("VisionModelWithProjection").removesuffix("VisionModel")
    if family != kind:
        config = getattr(transformers, f"{family}VisionConfig")(**VISION)
    else:
        family = kind.removesuffix("Model")
        half = {**HALF, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        kind_of_config = getattr(transformers, f"{family}Config")
        config = kind_of_config(vision_config=VISION, text_config=half)
    return getattr(transformers, kind)(config)


def _decoder(kind, **settings):
    sizes = TEXT | settings
    if kind == "Qwen2":
        del sizes["head_dim"]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def _save(model, path):
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(path)
    return str(path)


def _spec(*, model=None, **towers):
    sizes = {} if model is None else {"model": model}
    given = {tower: {"weights": str(path)} for tower, path in towers.items()}
    return ModelSpec.model_validate({"family": "llava", "towers": given, "sizes": sizes})


def _build(spec, *, seed=0, tokens=TOKENS, device="cpu"):
    return build(spec, tokens=tokens, image=IMAGE, seed=seed, device=device).eval()


def _vision_of(model):
    return getattr(model, "vision_model", model)


@pytest.fixture
def siglip(tmp_path):
    return _save(_tower("SiglipModel"), tmp_path / "siglip")


@pytest.fixture
def qwen(tmp_path):
    return _save(_decoder("Qwen3", tie_word_embeddings=True), tmp_path / "qwen")


PAIRS = [
    ("SiglipModel", "Qwen3", True),
    ("SiglipVisionModel", "Llama", False),
    ("CLIPModel", "Llama", True),
    ("CLIPVisionModel", "Qwen3", False),
    ("CLIPVisionModelWithProjection", "Qwen2", False),
]


@pytest.mark.parametrize(("vision", "language", "tied"), PAIRS)
def test_towers_are_those_that_were_saved(vision, language, tied, tmp_path):
    settings = {} if language == "Qwen2" else {"attention_bias": True}
    tower, decoder = _tower(vision), _decoder(language, tie_word_embeddings=tied, **settings)
    spec = _spec(vision=_save(tower, tmp_path / "v"), language=_save(decoder, tmp_path / "l"))
    model = _build(spec)

    theirs = dict(_vision_of(tower).named_parameters())
    ours = dict(model.model.vision_tower.named_parameters())
    heads = {name for name in theirs if name.startswith("head.")}
    assert ours.keys() == theirs.keys() - heads
    assert bool(heads) == vision.startswith("Siglip")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    theirs = dict(decoder.model.named_parameters())
    ours = dict(model.model.language_model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(model.lm_head.weight, decoder.lm_head.weight)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied

    pixels, ids = torch.randn(2, 3, 32, 32), torch.randint(0, 96, (2, 12))
    with torch.no_grad():
        expected = _vision_of(tower).eval()(pixel_values=pixels).last_hidden_state
        found = model.model.vision_tower(pixel_values=pixels).last_hidden_state
        assert torch.equal(found, expected)
        logits = decoder.eval()(input_ids=ids).logits
        torch.testing.assert_close(model(input_ids=ids).logits, logits, rtol=1e-5, atol=1e-5)


def test_the_planner_sees_the_towers_sizes(siglip, qwen):
    spec = _spec(vision=siglip, language=qwen)
    shape = inspect(spec)
    model = _build(spec)
    counted = {name: tuple(each.shape) for name, each in model.named_parameters()}
    assert {each.name: each.shape for each in shape.parameters} == counted
    assert shape.tied_parameters
    assert shape.sizes["text"]["rope_parameters"]["rope_theta"] == 500.0
    assert shape.sizes["model"]["vision_feature_select_strategy"] == "full"


HUB = {
    "clip-vit-large-patch14-336": {
        "model_type": "clip",
        "projection_dim": 768,
        "text_config": {"hidden_size": 768, "bos_token_id": 0, "eos_token_id": 2},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "image_size": 336,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "projection_dim": 768,
        },
    },
    "Llama-3.2-1B": {
        "model_type": "llama",
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
}
"""What the hub's config.json say, in the form of older releases."""


def test_sizes_of_the_hub_make_the_models_that_were_published(tmp_path):
    for name, config in HUB.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    vision, language = (tmp_path / name for name in HUB)
    shape = inspect(_spec(vision=vision, language=language))
    counts = Counter()
    for each in shape.parameters:
        counts[each.tower] += each.num_elements
    # The published models' own numbers of parameters.
    assert (counts["vision"], counts["language"]) == (303_507_456, 1_235_814_400)
    rope = shape.sizes["text"]["rope_parameters"]
    assert (rope["rope_type"], rope["rope_theta"], rope["factor"]) == ("llama3", 500000.0, 32.0)
    assert shape.sizes["model"]["vision_feature_select_strategy"] == "default"


def test_the_projector_is_drawn_from_the_seed(siglip, qwen):
    spec = _spec(vision=siglip, language=qwen)
    one, same, other = (dict(_build(spec, seed=seed).named_parameters()) for seed in (3, 3, 4))
    drawn = [name for name in one if not torch.equal(one[name], other[name])]
    assert drawn == [f"{PROJECTOR}linear_1.weight", f"{PROJECTOR}linear_2.weight"]
    assert all(torch.equal(one[name], same[name]) for name in one)


def test_one_tower_alone(siglip, qwen):
    sizes = {"text": {"model_type": "qwen3", **TEXT}, "vision": {}}
    spec = _spec(vision=siglip).model_copy(update={"sizes": sizes})
    model, other = _build(spec), _build(spec, seed=1)
    stored = load_file(f"{siglip}/model.safetensors")
    name = "encoder.layers.0.mlp.fc1.weight"
    assert torch.equal(model.get_parameter(TOWER + name), stored[f"vision_model.{name}"])
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    sizes = {"vision": {"model_type": "siglip_vision_model", "vision_use_head": False, **VISION}}
    spec = _spec(language=qwen).model_copy(update={"sizes": sizes})
    stored = load_file(f"{qwen}/model.safetensors")
    assert "lm_head.weight" not in stored
    assert torch.equal(_build(spec).lm_head.weight, stored["model.embed_tokens.weight"])


def test_parts_without_use_are_left_out_and_listed(siglip, qwen, caplog):
    with caplog.at_level(logging.INFO):
        _build(_spec(vision=siglip, language=qwen))
    (line,) = [each for each in caplog.messages if "left out" in each]
    stored = [name.partition(".") for name in load_file(f"{siglip}/model.safetensors")]
    num_text = sum(part == "text_model" for part, _, _ in stored)
    num_head = sum(part == "vision_model" and name.startswith("head.") for part, _, name in stored)
    told = line.partition("has: ")[2].split(", ")
    assert sorted(told) == [
        "logit_bias (1)",
        "logit_scale (1)",
        f"text_model.* ({num_text})",
        f"vision_model.head.* ({num_head})",
    ]


@pytest.mark.parametrize("tied", [True, False])
def test_new_tokens_get_the_mean_row(siglip, tmp_path, tied):
    decoder = _decoder("Llama", tie_word_embeddings=tied)
    spec = _spec(vision=siglip, language=_save(decoder, tmp_path / "l"))
    tokens = TOKENS.model_copy(update={"num_tokens": 100})
    with pytest.raises(ConfigError, match=r"has 100 tokens.*96.*resize_embeddings: true"):
        _build(spec, tokens=tokens, device="meta")
    model = _build(spec.model_copy(update={"resize_embeddings": True}), tokens=tokens)
    for ours, theirs in ((model.lm_head, decoder.lm_head), (model.model.language_model, decoder)):
        weight = getattr(ours, "embed_tokens", ours).weight
        old = getattr(getattr(theirs, "model", theirs), "embed_tokens", theirs).weight
        assert weight.shape == (100, 24)
        assert torch.equal(weight[:96], old)
        torch.testing.assert_close(weight[96:], old.mean(dim=0).expand(4, -1))


# What it is.


def test_the_identity_has_both_digests(siglip, qwen):
    spec = _spec(vision=siglip, language=qwen)
    found = pin(spec).towers
    alone = pin(ModelSpec(weights=qwen)).weights_sha256
    assert found.language.weights_sha256 == alone
    assert found.vision.weights_sha256 not in (None, alone)
    assert pin(pin(spec)) == pin(spec)


@pytest.mark.parametrize("tower", ["vision", "language"])
def test_a_file_that_changed_is_another_run_and_is_refused(siglip, qwen, tower):
    spec = pin(_spec(vision=siglip, language=qwen))
    path = {"vision": siglip, "language": qwen}[tower] + "/model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values())).add_(1)
    save_file(tensors, path)
    anew = pin(_spec(vision=siglip, language=qwen))
    changed = [
        name
        for name in ("vision", "language")
        if getattr(anew.towers, name) != getattr(spec.towers, name)
    ]
    assert changed == [tower]
    with pytest.raises(ConfigError, match=rf"plan.model.towers.{tower}.weights_sha256"):
        _build(spec)


def test_a_language_model_without_its_head(siglip, tmp_path):
    decoder = _decoder("Qwen3", tie_word_embeddings=True)
    path = _save(decoder.model, tmp_path / "l")
    model = _build(_spec(vision=siglip, language=path))
    assert torch.equal(model.lm_head.weight, decoder.model.embed_tokens.weight)
    untied = _decoder("Qwen3", tie_word_embeddings=False)
    path = _save(untied.model, tmp_path / "u")
    with pytest.raises(ConfigError, match=r"1 missing: lm_head\.weight"):
        _build(_spec(vision=siglip, language=path))


# What is refused.


@pytest.mark.parametrize(
    ("group", "name", "value", "own"),
    [
        ("vision", "hidden_size", 64, "32"),
        ("text", "vocab_size", 512, "96"),
        ("text", "model_type", "llama", "qwen3"),
        ("vision", "vision_use_head", True, "False"),
        ("text", "width", 3, "no such size"),
    ],
)
def test_sizes_that_are_not_the_towers_are_refused(siglip, qwen, group, name, value, own):
    spec = _spec(vision=siglip, language=qwen)
    given = spec.model_copy(update={"sizes": {group: {name: value}}})
    message = rf"sizes.{group}.{name} is {value}, and '.*' has {own}"
    with pytest.raises(ConfigError, match=message):
        complete_sizes(given)


def test_sizes_that_are_the_towers_may_be_given(siglip, qwen):
    spec = _spec(vision=siglip, language=qwen)
    given = spec.model_copy(update={"sizes": {"vision": {**VISION, "depth": None}}})
    assert complete_sizes(given) == complete_sizes(spec)


def test_other_families_and_weights_besides_are_refused(siglip):
    spec = _spec(vision=siglip).model_copy(update={"family": "internvl"})
    with pytest.raises(ConfigError, match=r"plan.model.towers is set .* 'internvl'"):
        inspect(spec)
    towers = {"vision": {"weights": siglip}}
    with pytest.raises(ValidationError, match="both 'weights'"):
        ModelSpec.model_validate({"family": "llava", "weights": "a/b", "towers": towers})
    with pytest.raises(ValidationError, match=r"'allow_extra' is set .*towers.<tower>.allow_extra"):
        ModelSpec.model_validate({"family": "llava", "towers": towers, "allow_extra": ["a"]})
    with pytest.raises(ValidationError, match="'resize_embeddings' is set"):
        ModelSpec.model_validate({"family": "llava", "towers": towers, "resize_embeddings": True})
    with pytest.raises(ValidationError, match="no tower is named"):
        ModelSpec.model_validate({"family": "llava", "towers": {}})


def test_towers_of_other_kinds_are_refused(siglip, qwen):
    with pytest.raises(ConfigError, match=r"towers.vision.weights is .* of the kind 'qwen3'"):
        inspect(_spec(vision=qwen, language=qwen))
    with pytest.raises(ConfigError, match=r"towers.language.weights is .* of the kind 'siglip'"):
        inspect(_spec(vision=siglip, language=siglip))


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("auto_map", {"AutoModel": "m.Model"}, "code that comes with the weights"),
        ("quantization_config", {"quant_method": "gptq"}, "quantised"),
    ],
)
@pytest.mark.parametrize("tower", ["vision", "language"])
def test_code_and_quantised_weights_are_refused(siglip, qwen, tower, name, value, found):
    path = {"vision": siglip, "language": qwen}[tower] + "/config.json"
    with open(path) as file:
        config = json.load(file)
    with open(path, "w") as file:
        json.dump(config | {name: value}, file)
    with pytest.raises(ConfigError, match=found):
        inspect(_spec(vision=siglip, language=qwen))


def test_pickles_are_refused(siglip, qwen, tmp_path):
    (tmp_path / "qwen" / "model.safetensors").rename(tmp_path / "qwen" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model.bin, which would run code"):
        pin(_spec(vision=siglip, language=qwen))


def test_what_does_not_fit_is_listed_by_tower(siglip, qwen):
    path = f"{qwen}/model.safetensors"
    tensors = load_file(path)
    tensors["model.audio.weight"] = torch.zeros(2)
    del tensors["model.norm.weight"]
    tensors["model.layers.1.input_layernorm.weight"] = torch.zeros(5)
    save_file(tensors, path)
    spec = _spec(vision=siglip, language=qwen)
    with pytest.raises(ConfigError) as error:
        _build(spec)
    for found in (
        "1 missing: model.norm.weight",
        "1 extra: model.audio.weight",
        "1 of another shape: model.layers.1.input_layernorm.weight is [5]",
        "plan.model.towers.language.allow_missing",
    ):
        assert found in str(error.value)
    del tensors["model.layers.1.input_layernorm.weight"]
    save_file(tensors, path)
    language = {
        "weights": qwen,
        "allow_missing": ["model.norm.*", "model.layers.1.input_layernorm.weight"],
        "allow_extra": ["model.audio.*"],
    }
    towers = {"vision": {"weights": siglip}, "language": language}
    model = _build(ModelSpec.model_validate({"family": "llava", "towers": towers}))
    assert torch.equal(model.model.language_model.norm.weight, torch.ones(24))


# On ranks.


def _hold(*, layout, spec):
    """Spread a composition as a worker does; returns its weights whole, and what a rank holds."""
    from functools import partial

    from diptych.core.records import OptimizerSpec
    from diptych.model.families import units
    from diptych.model.streaming import Reading
    from diptych.parallel.spread import spread
    from diptych.parallel.storage import MODEL_PREFIX
    from diptych.train.optimizers import build_optimizer
    from diptych.train.step import LossModule
    from tests.model.test_streaming import whole
    from tests.runs import _world

    world = _world()
    model = build(spec, tokens=TOKENS, image=IMAGE, seed=5, device="meta")
    engine = spread(
        LossModule(model),
        model=model,
        units=units(model),
        layout=layout,
        world=world,
        build_optimizer=partial(build_optimizer, spec=OptimizerSpec()),
        weights=Reading(model, spec=spec, seed=5, device=world.device),
    )
    try:
        found = {
            name.removeprefix(MODEL_PREFIX): whole(tensor)
            for name, tensor in engine.tensors().items()
            if name.startswith(MODEL_PREFIX)
        }
        held = sum(getattr(each, "_local_tensor", each).numel() for each in model.parameters())
    finally:
        engine.close()
    return found, held


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2, dora=True)], ids=["", "with adapters"])
def test_two_ranks_of_fsdp2_hold_what_one_process_has(ranks, siglip, qwen, lora):
    if lora is not None:
        pytest.importorskip("peft")
    spec = pin(_spec(vision=siglip, language=qwen)).model_copy(update={"lora": lora})
    expected = dict(_build(spec, seed=5).named_parameters())
    results = ranks(2).run(_hold, layout=Layout(engine="fsdp2", shard=2), spec=spec)
    for found, _ in results:
        assert found.keys() == expected.keys()
        for name, parameter in expected.items():
            assert np.array_equal(found[name], parameter.detach().numpy()), name
    total = sum(each.numel() for each in expected.values())
    assert all(0 < held < total for _, held in results)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2),
        Layout(engine="fsdp2", shard=2, fsdp=FsdpOptions(offload=True)),
        Layout(engine="zero", shard=2, zero=ZeroOptions(stage=2)),
        Layout(engine="zero", shard=2, zero=ZeroOptions(stage=3)),
    ],
    ids=["ddp", "fsdp2 offloaded", "zero 2", "zero 3"],
)
def test_every_layout_holds_the_same(ranks, siglip, qwen, layout):
    if layout.engine == "zero":
        pytest.importorskip("deepspeed")
    spec = pin(_spec(vision=siglip, language=qwen))
    expected = dict(_build(spec, seed=5).named_parameters())
    for found, _ in ranks(2).run(_hold, layout=layout, spec=spec):
        assert found.keys() == expected.keys()
        for name, parameter in expected.items():
            assert np.array_equal(found[name], parameter.detach().numpy()), name
