"""Adapters in a model: where they stand, what they begin with, and what is refused."""

from __future__ import annotations

import fnmatch
import importlib.util

import pytest
import torch
from pydantic import ValidationError

from diptych.core.errors import ConfigError
from diptych.core.records import Layout, LoraSpec, MixedPrecision
from diptych.data.processor import read_processor_info
from diptych.model.assemble import build
from diptych.model.features import freeze
from diptych.model.inspect import inspect
from diptych.model.parameters import list_parameters
from diptych.plan.refusals import Setting, refusal
from diptych.shape.adapters import is_adapter, plain_name
from tests.conftest import TINY_MODEL
from tests.families.cases import CASES
from tests.plan.conftest import gpu_cluster

LAYER = "model.language_model.layers.0.self_attn.q_proj"


def _spec(freeze=(), **lora):
    return TINY_MODEL.model_copy(update={"lora": LoraSpec(**lora), "freeze": freeze})


@pytest.fixture
def make(corpus):
    info = read_processor_info(corpus.processor)

    def make(spec, *, seed=0, device="cpu"):
        model = build(spec, tokens=info.tokens, image=info.image, seed=seed, device=device)
        freeze(model, frozen=spec.freeze)
        return model

    return make


def test_every_linear_layer_of_the_towers_blocks_has_one(make):
    shape = inspect(_spec(rank=4))
    adapters = {each.name: each for each in shape.parameters if is_adapter(each.name)}
    # 2 layers of q, k, v, o, gate, up and down, each with an A and a B.
    assert len(adapters) == 2 * 7 * 2
    assert adapters[f"{LAYER}.lora_A.default.weight"].shape == (4, 32)
    assert adapters[f"{LAYER}.lora_B.default.weight"].shape == (32, 4)
    assert {each.tower for each in adapters.values()} == {"language"}
    assert all(each.block for each in adapters.values())
    trained = {each.name for each in shape.trained}
    assert adapters.keys() <= trained
    assert {each.tower for each in shape.trained if each.name not in adapters} == {
        "vision",
        "connector",
    }


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("frozen", [(), ("vision", "language"), ("model.language_model.norm.*",)])
def test_the_plan_lists_what_the_rank_has(make, frozen, dora):
    spec = _spec(frozen, rank=4, towers=("language", "vision"), dora=dora)
    assert inspect(spec).parameters == list_parameters(make(spec, device="meta"))


def test_adapters_change_nothing_at_first_and_leave_the_generator_alone(make):
    state = torch.get_rng_state()
    adapted = make(_spec(rank=4, dora=True))
    assert torch.equal(torch.get_rng_state(), state)
    ids_BS = torch.arange(20, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            adapted(input_ids=ids_BS).logits, make(TINY_MODEL)(input_ids=ids_BS).logits
        )


def test_they_are_drawn_by_name_and_seed(make):
    one = dict(make(_spec(rank=4)).named_parameters())
    other = dict(make(_spec(rank=4, targets=("*.q_proj",))).named_parameters())
    name = f"{LAYER}.lora_A.default.weight"
    assert torch.equal(one[name], other[name])
    assert not torch.equal(one[name], dict(make(_spec(rank=4), seed=1).named_parameters())[name])
    # Peft's own range: 1 / sqrt(columns).
    assert 0.9 / 32**0.5 < one[name].abs().max() <= 1 / 32**0.5
    assert not one[f"{LAYER}.lora_B.default.weight"].any()
    again = one[name.replace("q_proj", "k_proj")]
    assert not torch.equal(one[name], again)


def test_magnitudes_are_the_lengths_of_the_weights_rows(make):
    weights = dict(make(_spec(rank=4, dora=True)).named_parameters())
    rows = weights[f"{LAYER}.base_layer.weight"].detach()
    expected = torch.stack([row.pow(2).sum().sqrt() for row in rows])
    found = weights[f"{LAYER}.lora_magnitude_vector.default.weight"].detach()
    torch.testing.assert_close(found, expected)


def test_frozen_weights_get_no_gradient(make):
    spec = _spec(("vision", "connector"), rank=4)
    model = make(spec)
    model(input_ids=torch.arange(20, 40)[None]).logits.logsumexp(-1).sum().backward()
    got = {name for name, each in model.named_parameters() if each.grad is not None}
    assert got == {name for name, _ in model.named_parameters() if is_adapter(name)}


def test_a_layer_that_no_loss_depends_on_gets_none():
    case = CASES["clip + qwen3"].model
    spec = case.model_copy(update={"lora": LoraSpec(rank=2, towers=("vision",))})
    shape = inspect(spec)
    adapters = [each.name for each in shape.parameters if is_adapter(each.name)]
    # The features are those of the last layer but one.
    assert fnmatch.filter(adapters, "*layers.1.*")
    assert not fnmatch.filter(adapters, "*layers.2.*")


@pytest.mark.parametrize("name", CASES)
def test_every_family_takes_them(name):
    plain = CASES[name].model
    spec = plain.model_copy(update={"lora": LoraSpec(rank=2, towers=("vision", "language"))})
    shape, without = inspect(spec), inspect(plain)
    own = [each for each in shape.parameters if not is_adapter(each.name)]
    assert [plain_name(each.name) for each in own] == [each.name for each in without.parameters]
    trained = [each for each in own if each.trains]
    assert {each.tower for each in trained} == {each.tower for each in without.trained} - {
        "vision",
        "language",
    }
    assert shape.layer_classes == without.layer_classes


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"targets": ("*.q_pro",)}, r"'\*\.q_pro'.*nearest names are: \S*q_proj"),
        ({"targets": ("*.q_proj", "*.nothing")}, r"'\*\.nothing'"),
        ({"targets": ("lm_head",)}, "matches 'lm_head'.*head trains whole"),
        ({"targets": ("*embed_tokens",)}, "embed_tokens'.*head and embedding get no adapter"),
        ({"targets": ("model.visual.*.qkv",)}, r"Name the tower vision in plan\.model\.lora"),
        ({"targets": ("*layers.0.input_layernorm",)}, "adapters stand beside linear layers"),
        ({"towers": ("connector",)}, r"names connector.*linear_fc1.*Name its layers"),
        (
            {"towers": ("vision", "language"), "targets": ("*.q_proj",)},
            "names vision, and no linear layer of it",
        ),
    ],
)
def test_what_means_no_linear_layer_is_refused(lora, said):
    with pytest.raises(ConfigError, match=said):
        inspect(_spec(**lora))


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"rank": 0}, "greater than or equal to 1"),
        ({"alpha": 0}, "greater than 0"),
        ({"dropout": 1.0}, "less than 1"),
        ({"towers": ["head"]}, "take head out of towers"),
        ({"towers": []}, "set lora to null"),
        ({"towers": ["speech"]}, "'vision', 'connector' or 'language'"),
        ({"r": 4}, "Extra inputs|rank"),
    ],
)
def test_settings_that_cannot_be_are_refused(lora, said):
    with pytest.raises(ValidationError, match=said):
        LoraSpec(**lora)


def test_without_peft_the_driver_says_how_to_get_it(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "peft" else find(name)
    )
    with pytest.raises(ConfigError, match=r"pip install 'diptych\[lora\]'"):
        inspect(_spec())


def test_fp8_beside_adapters_is_refused():
    layout = Layout(
        engine="fsdp2",
        device="cuda",
        shard=2,
        precision="bf16",
        mixed_precision=MixedPrecision(fp8=("language",)),
    )
    cluster = gpu_cluster("NVIDIA H100", 80_000_000_000, num_devices=2)
    reasons = {
        name: refusal(
            layout,
            setting=Setting(
                model_shape=inspect(spec),
                cluster=cluster,
                num_micro_batches=2,
                group=1,
                global_batch=8,
            ),
        )
        for name, spec in (("plain", TINY_MODEL), ("adapted", _spec()))
    }
    assert reasons["plain"] is None
    assert "both name language" in str(reasons["adapted"])
