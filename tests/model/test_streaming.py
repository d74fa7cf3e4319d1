"""Weights and buffers read tensor by tensor are those of transformers' from_pretrained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from diptych.core.errors import ConfigError
from diptych.core.records import FsdpOptions, Layout, ModelSpec, ZeroOptions
from diptych.model.assemble import ATTENTION, build
from diptych.model.revision import pin
from diptych.model.streaming import Reading, outline
from tests.conftest import TINY_MODEL
from tests.model.families import config_of
from tests.parallel.small import IMAGE, TOKENS, step

FAMILIES = ["llava", "llava_onevision", "gemma3", "qwen2_5_vl", "internvl", "smolvlm"]
CPU = torch.device("cpu")
EMBEDDING, HEAD = "model.language_model.embed_tokens.weight", "lm_head.weight"

LLAVA_OF_OLD = [
    ("lm_head.", "language_model.lm_head."),
    ("model.language_model.", "language_model.model."),
    ("model.vision_tower.", "vision_tower.vision_model."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
]
OLD_NAMES = {
    "llava": LLAVA_OF_OLD,
    "gemma3": LLAVA_OF_OLD,
    "qwen2_5_vl": [("model.visual.", "visual."), ("model.language_model.", "model.")],
}


def drawn(config, seed=0):
    torch.manual_seed(seed)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


def read(folder, *, family, seed=0, **settings):
    """Load a folder as a rank of one process does."""
    spec = ModelSpec(family=family, weights=str(folder), **settings)
    from diptych.model.weights import read_config

    model = outline(read_config(spec), attention={})
    Reading(model, spec=spec, seed=seed, device=CPU).fill(model, device=CPU)
    return model


def assert_equal(ours, theirs):
    assert [name for name, _ in ours.named_parameters()] == [
        name for name, _ in theirs.named_parameters()
    ]
    for name, expected in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), expected), name
    buffers = dict(theirs.named_buffers())
    assert dict(ours.named_buffers()).keys() == buffers.keys()
    for name, expected in buffers.items():
        found = ours.get_buffer(name)
        assert found.dtype == expected.dtype, name
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_buffers_equal_transformers_own(family, tmp_path):
    saved = drawn(config_of(family))
    saved.save_pretrained(tmp_path)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    assert list(theirs.named_buffers())
    ours = read(tmp_path, family=family)
    assert_equal(ours, theirs)
    assert_equal(ours, saved)


@pytest.mark.parametrize("family", OLD_NAMES)
def test_old_names_are_those_of_today(family, tmp_path):
    saved = drawn(config_of(family))
    saved.config.save_pretrained(tmp_path)
    old = {}
    for name, tensor in saved.state_dict().items():
        for new, former in OLD_NAMES[family]:
            if name.startswith(new):
                name = former + name.removeprefix(new)
                break
        old[name] = tensor.clone()
    assert old.keys() != saved.state_dict().keys()
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    ours = read(tmp_path, family=family)
    assert_equal(ours, theirs)
    assert_equal(ours, saved)


def test_tensors_that_are_turned_in_files_are_turned_back(tmp_path):
    """Experts of Qwen3-VL lie in files transposed."""
    from transformers import Qwen3VLMoeConfig

    text = config_of("qwen2_5_vl").text_config.to_dict()
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
    config = Qwen3VLMoeConfig(
        text_config={
            **{key: text[key] for key in keys},
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "rope_parameters": text["rope_parameters"],
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
        },
    )
    saved = drawn(config)
    saved.config.save_pretrained(tmp_path)
    tensors = saved.state_dict()
    turned = {
        name: each.transpose(1, 2).contiguous() if ".experts." in name else each.clone()
        for name, each in tensors.items()
    }
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    assert turned[name].shape != tensors[name].shape
    save_file(turned, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours = read(tmp_path, family="qwen3_vl_moe")
    assert_equal(ours, saved)
    assert_equal(ours, AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32))


def test_weights_that_several_tensors_make_are_computed(tmp_path, monkeypatch):
    """One tensor becomes three, and two become one, by operations of transformers."""
    from transformers.core_model_loading import Chunk, Concatenate, WeightConverter

    from diptych.model import names

    attention = [f"self_attn.{part}_proj.weight" for part in "qkv"]
    halves = ["mlp.up_proj.left.weight", "mlp.up_proj.right.weight"]
    monkeypatch.setattr(
        names,
        "get_model_conversion_mapping",
        lambda model: [
            WeightConverter("self_attn.qkv.weight", attention, [Chunk(dim=0)]),
            WeightConverter(halves, "mlp.up_proj.weight", [Concatenate(dim=0)]),
        ],
    )
    saved = drawn(config_of("llava"))
    saved.config.save_pretrained(tmp_path)
    tensors = {name: each.clone() for name, each in saved.state_dict().items()}
    for layer in range(2):
        before = f"model.vision_tower.encoder.layers.{layer}."
        parts = [tensors.pop(before + name) for name in attention]
        tensors[f"{before}self_attn.qkv.weight"] = torch.cat(parts)
        before = f"model.language_model.layers.{layer}."
        whole = tensors.pop(f"{before}mlp.up_proj.weight")
        for name, half in zip(halves, whole.chunk(2), strict=True):
            tensors[before + name] = half.clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_equal(read(tmp_path, family="llava"), saved)


def test_other_dtypes_are_cast_and_files_may_be_several(tmp_path):
    saved = drawn(config_of("llava")).to(torch.bfloat16)
    saved.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = read(tmp_path, family="llava")
    assert {each.dtype for each in ours.parameters()} == {torch.float32}
    for name, expected in saved.named_parameters():
        assert torch.equal(ours.get_parameter(name), expected.float()), name
    assert_equal(ours, AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32))


def rewrite(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_weights_are_drawn_as_transformers_draws_them(tmp_path):
    drawn(config_of("llava")).save_pretrained(tmp_path)

    def drop(tensors):
        for name in [name for name in tensors if "projector" in name or "layers.1.mlp" in name]:
            del tensors[name]

    rewrite(tmp_path, drop)
    torch.manual_seed(5)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    torch.manual_seed(77)
    before = torch.random.get_rng_state()
    patterns = ("*multi_modal_projector*", "*layers.1.mlp*")
    ours = read(tmp_path, family="llava", seed=5, allow_missing=patterns)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert_equal(ours, theirs)
    other = read(tmp_path, family="llava", seed=6, allow_missing=patterns)
    name = "model.multi_modal_projector.linear_1.weight"
    assert not torch.equal(other.get_parameter(name), theirs.get_parameter(name))


# Tied weights.


@pytest.mark.parametrize("kept", [EMBEDDING, HEAD])
def test_tied_weights_are_read_under_either_name(tmp_path, kept):
    saved = drawn(config_of("gemma3"))
    saved.config.save_pretrained(tmp_path)
    tensors = saved.state_dict()
    tensors = {name: each for name, each in tensors.items() if name not in (EMBEDDING, HEAD)}
    save_file({**tensors, kept: saved.lm_head.weight}, tmp_path / "model.safetensors")
    ours = read(tmp_path, family="gemma3")
    assert ours.lm_head.weight is ours.get_input_embeddings().weight
    assert torch.equal(ours.lm_head.weight, saved.lm_head.weight)


def test_tied_weights_under_both_names_have_to_be_equal(tmp_path):
    saved = drawn(config_of("gemma3"))
    saved.config.save_pretrained(tmp_path)
    tensors = {name: each.clone() for name, each in saved.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert_equal(read(tmp_path, family="gemma3"), saved)
    tensors[HEAD][3, 4] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"other values in '{HEAD}' than in '{EMBEDDING}'"):
        read(tmp_path, family="gemma3")


# More tokens than the weights know.


def with_vocabulary(num_tokens):
    sizes = {**TINY_MODEL.sizes, "text": {**TINY_MODEL.sizes["text"], "vocab_size": num_tokens}}
    return TINY_MODEL.model_copy(update={"sizes": sizes})


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def small_vocabulary(request, tmp_path):
    """Weights of a model that knows 480 tokens; the processor has 500."""
    spec = with_vocabulary(480).model_copy(update={"tie_word_embeddings": request.param})
    small = TOKENS.model_copy(update={"num_tokens": 480})
    build(spec, tokens=small, image=IMAGE, seed=1).save_pretrained(tmp_path)
    return tmp_path


def test_new_tokens_are_refused_with_the_cure(small_vocabulary):
    spec = ModelSpec(weights=str(small_vocabulary))
    with pytest.raises(ConfigError, match=r"has 500 tokens.*480.*resize_embeddings: true"):
        build(spec, tokens=TOKENS, image=IMAGE, seed=0, device="meta")


def test_new_tokens_start_as_the_mean_of_the_old(small_vocabulary):
    spec = ModelSpec(weights=str(small_vocabulary), resize_embeddings=True)
    model = build(spec, tokens=TOKENS, image=IMAGE, seed=0)
    old = load_file(small_vocabulary / "model.safetensors")
    assert model.config.text_config.vocab_size == 500
    names = [name for name in (EMBEDDING, HEAD) if name in old]
    for name in names:
        weight = model.get_parameter(name)
        assert weight.shape == (500, 32)
        assert torch.equal(weight[:480], old[name])
        mean = old[name].double().mean(dim=0).float()
        torch.testing.assert_close(weight[480:], mean.expand(20, 32), rtol=1e-6, atol=1e-8)
    tied = len(names) == 1
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


def test_new_tokens_start_where_transformers_lets_them_start(small_vocabulary):
    """Transformers adds noise of a standard deviation near 3e-5 of the old rows'."""
    theirs = AutoModelForImageTextToText.from_pretrained(small_vocabulary, dtype=torch.float32)
    theirs.resize_token_embeddings(500)
    spec = ModelSpec(weights=str(small_vocabulary), resize_embeddings=True)
    ours = build(spec, tokens=TOKENS, image=IMAGE, seed=0)
    assert (ours.lm_head.weight - theirs.lm_head.weight).abs().max() <= 1e-4
    assert ours.config.text_config.vocab_size == theirs.config.text_config.vocab_size


# On ranks.


def spread_weights(layout, *, spec, count=False):
    """Spread weights of a folder over ranks as a worker does; returns them whole.

    With `count` also how many elements this rank has read, and how many it holds.
    """
    from diptych.core.records import OptimizerSpec
    from diptych.model.families import units
    from diptych.model.features import freeze
    from diptych.model.tensor_files import TensorFiles
    from diptych.parallel.spread import spread
    from diptych.parallel.storage import MODEL_PREFIX
    from diptych.train.optimizers import build_optimizer
    from diptych.train.step import LossModule
    from tests.runs import _world

    num_read = 0
    original = TensorFiles.read

    def reading(self, name, **options):
        nonlocal num_read
        found = original(self, name, **options)
        num_read += found.numel()
        return found

    TensorFiles.read = reading
    world = _world()
    groups = []

    def optimizer_of(model):
        made = build_optimizer(model, spec=OptimizerSpec())
        groups.extend(sum(each.numel() for each in one["params"]) for one in made.param_groups)
        return made

    try:
        model = build(spec, tokens=TOKENS, image=IMAGE, seed=5, device="meta")
        weights = Reading(model, spec=spec, seed=5, device=world.device)
        freeze(model, frozen=spec.freeze)
        engine = spread(
            LossModule(model),
            model=model,
            units=units(model),
            layout=layout,
            world=world,
            build_optimizer=optimizer_of,
            weights=weights,
        )
    finally:
        TensorFiles.read = original
    try:
        found = {
            name.removeprefix(MODEL_PREFIX): whole(tensor)
            for name, tensor in engine.tensors().items()
            if name.startswith(MODEL_PREFIX)
        }
        num_held = sum(
            getattr(each, "_local_tensor", each).numel() for each in engine.model.parameters()
        )
        buffers = {name: each.numpy().copy() for name, each in engine.model.named_buffers()}
        assert step(engine).applied
    finally:
        engine.close()
    return (num_read, num_held) if count else (found, buffers, groups)


def whole(tensor):
    import torch.distributed as dist

    if not hasattr(tensor, "full_tensor"):
        return tensor.detach().numpy().copy()
    rows = tensor.detach().to_local().contiguous()
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, rows.numpy())
    return np.concatenate([part for part in parts if part.shape[0]])


LAYOUTS = {
    "ddp": Layout(dp=2),
    "fsdp2": Layout(engine="fsdp2", shard=2),
    "fsdp2 in bf16": Layout(engine="fsdp2", shard=2, precision="bf16"),
    "fsdp2 offloaded": Layout(engine="fsdp2", shard=2, fsdp=FsdpOptions(offload=True)),
    "zero 1": Layout(engine="zero", shard=2, zero=ZeroOptions(stage=1)),
    "zero 2": Layout(engine="zero", shard=2, zero=ZeroOptions(stage=2)),
    "zero 3": Layout(engine="zero", shard=2, zero=ZeroOptions(stage=3)),
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_reads_the_same_weights(ranks, tmp_path, name, tied):
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    drawn_spec = TINY_MODEL.model_copy(update={"tie_word_embeddings": tied})
    saved = build(drawn_spec, tokens=TOKENS, image=IMAGE, seed=3)
    saved.save_pretrained(tmp_path)
    spec = pin(ModelSpec(weights=str(tmp_path), freeze=("vision",)))
    for found, buffers, _ in ranks(2).run(spread_weights, layout=LAYOUTS[name], spec=spec):
        expected = dict(saved.named_parameters())
        assert found.keys() == expected.keys()
        for each, parameter in expected.items():
            assert np.array_equal(found[each], parameter.detach().numpy()), each
        for each, buffer in saved.named_buffers():
            assert np.array_equal(buffers[each], buffer.numpy()), each


def test_zero_3_in_bf16_reads_what_stage_2_reads(ranks, tmp_path):
    pytest.importorskip("deepspeed")
    build(TINY_MODEL, tokens=TOKENS, image=IMAGE, seed=3).save_pretrained(tmp_path)
    spec = ModelSpec(weights=str(tmp_path))
    two, three = (
        ranks(2).run(
            spread_weights,
            layout=Layout(engine="zero", shard=2, precision="bf16", zero=ZeroOptions(stage=stage)),
            spec=spec,
        )[0]
        for stage in (2, 3)
    )
    for name, expected in two[0].items():
        assert np.array_equal(three[0][name], expected), name


def test_decay_groups_are_the_same_when_weights_are_cut_up_as_they_come(ranks, tmp_path):
    pytest.importorskip("deepspeed")
    saved = build(TINY_MODEL, tokens=TOKENS, image=IMAGE, seed=3)
    saved.save_pretrained(tmp_path)
    spec = ModelSpec(weights=str(tmp_path))
    embeddings = {saved.get_input_embeddings().weight, saved.model.visual.pos_embed.weight}
    decayed = sum(
        each.numel() for each in saved.parameters() if each.ndim >= 2 and each not in embeddings
    )
    found = ranks(2).run(spread_weights, layout=LAYOUTS["zero 3"], spec=spec)[0][2]
    assert found[0] == decayed
    assert sum(found) == sum(each.numel() for each in saved.parameters())


def test_a_rank_reads_its_own_rows_alone(ranks, tmp_path):
    build(TINY_MODEL, tokens=TOKENS, image=IMAGE, seed=3).save_pretrained(tmp_path)
    spec = ModelSpec(weights=str(tmp_path))
    counts = ranks(2).run(spread_weights, layout=LAYOUTS["fsdp2"], spec=spec, count=True)
    for num_read, num_held in counts:
        assert num_read == num_held


def test_resized_and_drawn_weights_are_the_same_on_every_layout(ranks, tmp_path):
    small = TOKENS.model_copy(update={"num_tokens": 480})
    saved = build(with_vocabulary(480), tokens=small, image=IMAGE, seed=1)
    saved.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.visual.merger.linear_fc1.weight"))
    spec = ModelSpec(
        weights=str(tmp_path), resize_embeddings=True, allow_missing=("*merger.linear_fc1.weight",)
    )
    alone = build(spec, tokens=TOKENS, image=IMAGE, seed=5)
    for name in ("ddp", "fsdp2"):
        found, *_ = ranks(2).run(spread_weights, layout=LAYOUTS[name], spec=spec)[0]
        for each, parameter in alone.named_parameters():
            assert np.array_equal(found[each], parameter.detach().numpy()), (name, each)


def test_seedless_model_reads_no_weights(tmp_path):
    """What is loaded next comes from a checkpoint."""
    saved = build(TINY_MODEL, tokens=TOKENS, image=IMAGE, seed=3)
    saved.config.save_pretrained(tmp_path)
    model = build(ModelSpec(weights=str(tmp_path)), tokens=TOKENS, image=IMAGE, seed=None)
    assert {each.device for each in model.parameters()} == {CPU}
    for name, buffer in saved.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name)), name
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_attention_is_the_one_that_is_asked_for(tmp_path):
    build(TINY_MODEL, tokens=TOKENS, image=IMAGE, seed=3).save_pretrained(tmp_path)
    model = build(ModelSpec(weights=str(tmp_path)), tokens=TOKENS, image=IMAGE, seed=0)
    assert model.config.text_config._attn_implementation == ATTENTION["text_config"]
