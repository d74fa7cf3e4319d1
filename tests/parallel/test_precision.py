"""Each part computes in the dtype that the layout gives it, and weights stay fp32."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from diptych.core.errors import LayoutError
from diptych.core.records import Layout, MixedPrecision
from diptych.model.families import Unit
from diptych.parallel import fp8, precision
from tests.conftest import TINY_MODEL
from tests.parallel.small import make_inputs, spread_model, step

AXES = {"ddp": {"dp": 2}, "fsdp2": {"shard": 2}}
UNTIED = TINY_MODEL.model_copy(update={"tie_word_embeddings": False})
LAYERS = {
    "vision": "model.visual.blocks.1.mlp.linear_fc1",
    "connector": "model.visual.merger.linear_fc1",
    "language": "model.language_model.layers.1.mlp.up_proj",
    "head": "lm_head",
}
"""A linear layer of each tower: what it returns is in the dtype that it computed in."""


def make_layout(engine, dtype="bf16", **mixed):
    return Layout(
        engine=engine, **AXES[engine], precision=dtype, mixed_precision=MixedPrecision(**mixed)
    )


def computed_dtypes(layout, spec=TINY_MODEL):
    """Train a step; say what each tower's layers returned, in training and held out."""
    engine = spread_model(layout, spec=spec)
    found = {}
    for tower, name in LAYERS.items():
        engine.model.get_submodule(name).register_forward_hook(
            lambda module, args, output, tower=tower: found.update({tower: output.dtype})
        )
    assert step(engine, num_micro_batches=2).applied
    trained = dict(found)
    found.clear()
    engine.module.eval()
    with torch.no_grad(), engine.autocast():
        loss, _ = engine.module(**make_inputs())
    engine.module.train()
    assert found == trained
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss)
    assert step(engine).applied
    kept = {name: each.dtype for name, each in engine.tensors().items()}
    return trained, set(kept.values())


@pytest.mark.parametrize("engine", AXES)
@pytest.mark.parametrize(
    ("dtype", "towers"),
    [
        ("fp32", {}),
        ("bf16", {}),
        ("fp16", {}),
        ("bf16", {"vision": "fp32"}),
        ("bf16", {"vision": "fp16", "connector": "fp32"}),
        ("fp32", {"vision": "bf16"}),
        ("fp32", {"language": "bf16", "head": "bf16"}),
    ],
)
def test_a_tower_computes_in_its_dtype(ranks, engine, dtype, towers):
    layout = make_layout(engine, dtype, towers=towers)
    found, kept = ranks(2).run(computed_dtypes, layout=layout)[0]
    expected = {tower: precision.DTYPES[towers.get(tower, dtype)] for tower in LAYERS}
    assert found == expected
    # Weights and moments are fp32 in any case.
    assert kept == {torch.float32}


@pytest.mark.parametrize("engine", AXES)
def test_an_untied_head_has_a_dtype_of_its_own(ranks, engine):
    layout = make_layout(engine, towers={"head": "fp32"})
    found, _ = ranks(2).run(computed_dtypes, layout=layout, spec=UNTIED)[0]
    assert found["head"] == torch.float32
    assert found["language"] == torch.bfloat16


NORMS = [
    "model.visual.blocks.0.norm2",
    "model.visual.merger.norm",
    "model.language_model.layers.0.self_attn.q_norm",
    "model.language_model.norm",
]
ODD = 1 + 1 / 300
"""A weight that bf16 would round."""


def norm_errors(layout):
    """Say how far norms are from fp32 on the same input, in units of the output's last place."""
    engine = spread_model(layout)
    engine.module.train()
    with torch.no_grad():
        for module in precision.norms(engine.model):
            module.weight.fill_(ODD)
    seen = {}

    def keep(name):
        return lambda module, args, output: seen.update({name: (args[0], output)})

    for name in NORMS:
        engine.model.get_submodule(name).register_forward_hook(keep(name))
    assert step(engine).applied
    errors = {}
    for name, (hidden, output) in seen.items():
        wide = hidden.detach().double()
        if "visual" in name:
            wide = wide - wide.mean(-1, keepdim=True)
        expected = ODD * wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        exact = (expected.to(hidden.dtype) - output.detach()).abs().max() == 0
        errors[name] = (bool(exact), hidden.dtype, output.dtype)
    return errors


@pytest.mark.parametrize("engine", AXES)
def test_norms_compute_in_fp32(ranks, engine):
    kept = ranks(2).run(norm_errors, layout=make_layout(engine, keep_fp32=["norms"]))[0]
    plain = ranks(2).run(norm_errors, layout=make_layout(engine))[0]
    assert kept.keys() == plain.keys() == set(NORMS)
    for name, (exact, came, left) in kept.items():
        # Rounded once, to the dtype that came in.
        assert exact or came == torch.float32, name
        assert came == left, name
    assert torch.bfloat16 in {came for _, came, _ in kept.values()}
    assert not all(exact for exact, *_ in plain.values())


def norm_gradients(layout):
    """Return every norm's gradient, whole, after two micro-batches."""
    from tests.runs import whole_gradients

    engine = spread_model(layout)
    names = [name for name, _ in engine.model.named_parameters()]
    for number in (1, 2):
        with engine.micro_batch(is_last=number == 2), engine.autocast():
            loss, _ = engine.module(**make_inputs(number))
            engine.backward(loss, weight=1.0)
    return {
        name: gradient
        for name, gradient in zip(names, whole_gradients(engine), strict=True)
        if "norm" in name
    }


def test_norms_of_their_own_group_have_the_same_gradients(ranks):
    plain = ranks(2).run(norm_gradients, layout=make_layout("fsdp2", "fp32"))[0]
    layout = make_layout("fsdp2", "fp32", keep_fp32=["norms"])
    apart = ranks(2).run(norm_gradients, layout=layout)[0]
    assert len(plain) == 21
    for name, gradient in plain.items():
        np.testing.assert_allclose(apart[name], gradient, rtol=1e-5, atol=1e-7, err_msg=name)


def attention_dtypes(layout):
    """Return the dtypes that enter attention's product, and that leave the layer's attention."""
    engine = spread_model(layout)
    entered, left = set(), set()
    attend = functional.scaled_dot_product_attention

    def watched(query, key, value, **options):
        # What autocast would make of them is part of what enters.
        product = torch.matmul(query[..., :1, :], key[..., :1, :].transpose(-1, -2))
        entered.update([query.dtype, key.dtype, value.dtype, product.dtype])
        return attend(query, key, value, **options)

    for name in (
        "model.visual.blocks.0.attn.proj",
        "model.language_model.layers.0.self_attn.o_proj",
    ):
        engine.model.get_submodule(name).register_forward_pre_hook(
            lambda module, args: left.add(args[0].dtype)
        )
    functional.scaled_dot_product_attention = watched
    try:
        update = step(engine)
    finally:
        functional.scaled_dot_product_attention = attend
    assert update.applied
    return entered, left


@pytest.mark.parametrize("engine", AXES)
def test_attention_computes_in_fp32_and_returns_what_came(ranks, engine):
    plain, _ = ranks(2).run(attention_dtypes, layout=make_layout(engine))[0]
    assert torch.bfloat16 in plain
    layout = make_layout(engine, keep_fp32=["attention"])
    assert ranks(2).run(attention_dtypes, layout=layout)[0] == ({torch.float32}, {torch.bfloat16})


def sent_dtypes(layout):
    """Return the dtypes of gradients that FSDP2 hands to reduce-scatter."""
    name = "reduce_scatter_single"
    if not hasattr(dist, name):
        name = "reduce_scatter_tensor"
    reduce, seen = getattr(dist, name), set()

    def watched(**options):
        seen.add(options["input"].dtype)
        return reduce(**options)

    engine = spread_model(layout)
    setattr(dist, name, watched)
    try:
        assert step(engine, num_micro_batches=2).applied
    finally:
        setattr(dist, name, reduce)
    return seen


@pytest.mark.parametrize(
    ("dtype", "reduce"), [("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "bf16"), ("fp16", "fp32")]
)
def test_gradients_travel_in_the_dtype_of_reduce(ranks, dtype, reduce):
    layout = make_layout("fsdp2", dtype, reduce=reduce, keep_fp32=["norms"])
    layout = layout.model_copy(
        update={
            "mixed_precision": layout.mixed_precision.model_copy(
                update={
                    "loss_scale": layout.mixed_precision.loss_scale.model_copy(
                        update={"initial": 64.0}
                    )
                }
            )
        }
    )
    assert ranks(2).run(sent_dtypes, layout=layout)[0] == {precision.DTYPES[reduce]}


@pytest.mark.parametrize(
    ("layout", "refused"),
    [
        (Layout(precision="bf16"), True),
        (Layout(mixed_precision=MixedPrecision(towers={"vision": "bf16"})), True),
        (Layout(precision="fp16"), False),
    ],
)
def test_bf16_is_refused_on_a_gpu_before_ampere(monkeypatch, layout, refused):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    device = torch.device("cuda", 0)
    if refused:
        with pytest.raises(LayoutError, match=r"Tesla T4 \(compute capability 7.5\) has no bf16"):
            precision.check_device(layout, device=device)
    else:
        precision.check_device(layout, device=device)
    precision.check_device(layout, device=torch.device("cpu"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(32, 48, bias=False)
        self.odd = nn.Linear(48, 20)

    def forward(self, hidden):
        return self.odd(self.wide(hidden))


def unit(module):
    return Unit(name="block", module=module, tower="language", depth=0)


@pytest.mark.parametrize(
    ("device", "capability", "message"),
    [
        ("cpu", None, "A CPU does not compute in fp8"),
        ("cuda", (8, 0), "A100 does not compute in fp8. GPUs of compute capability 8.9"),
    ],
)
def test_fp8_is_refused_where_a_device_has_none(monkeypatch, device, capability, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(LayoutError, match=message):
        fp8.apply([unit(Block())], towers=["language"], device=torch.device(device))


def test_fp8_without_torchao_is_refused(monkeypatch):
    monkeypatch.setattr(fp8, "find_spec", lambda name: None)
    with pytest.raises(LayoutError, match="needs torchao, which is not installed"):
        fp8.apply([unit(Block())], towers=["language"], device=torch.device("cpu"), emulate=True)


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
def test_fp8_rounds_the_layers_that_fit():
    block, inputs = Block(), torch.randn(16, 32)
    names = [name for name, _ in block.named_parameters()]
    expected = block.wide(inputs)
    cpu = torch.device("cpu")
    fp8.apply([unit(block)], towers=["vision"], device=cpu, emulate=True)
    assert torch.equal(block.wide(inputs), expected)
    fp8.apply([unit(block)], towers=["language"], device=cpu, emulate=True)
    found = block.wide(inputs)
    # e4m3 has three bits after the point: each factor is off by at most 1/16.
    assert 1e-3 < (found - expected).norm() / expected.norm() < 1 / 16
    assert type(block.odd) is nn.Linear
    assert [name for name, _ in block.named_parameters()] == names
    block(inputs).sum().backward()
    assert block.wide.weight.grad.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("engine", AXES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_one_gpu_trains_in_16_bits(engine, dtype, tmp_path):
    from diptych.parallel import mesh
    from diptych.parallel.mesh import World
    from tests.parallel import small

    if not dist.is_initialized():
        store = dist.FileStore(str(tmp_path / "store"), 1)
        device = torch.device("cuda", 0)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    try:
        layout = Layout(engine=engine, precision=dtype, device="cuda")
        engine = small.spread_model(
            layout, world=World(rank=0, size=1, device=torch.device("cuda", 0))
        )
        norms = [small.step(engine).grad_norm for _ in range(5)]
        assert all(np.isfinite(norms[-3:]))
    finally:
        mesh.leave()
