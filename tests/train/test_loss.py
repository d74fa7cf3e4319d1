"""The loss in chunks, made by the head: equal to whole logits, in less memory, on unequal ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from diptych.core.errors import LayoutError
from diptych.core.records import Cluster, Device, Layout, MemoryOptions, ModelSpec, ZeroOptions
from diptych.model.assemble import build
from diptych.model.inspect import inspect
from diptych.model.loss import make_losses
from diptych.plan.refusals import Setting, refusal
from diptych.train.step import LossModule
from tests.conftest import TINY_MODEL
from tests.parallel.test_recompute import IMAGE, TOKENS, make_inputs
from tests.runs import whole_gradients

VOCABULARY, WIDTH = 96, 24
ZERO_3 = ZeroOptions(stage=3, persistence_threshold_elements=0)
LAYOUTS = {
    "ddp": {"engine": "ddp", "dp": 2},
    "fsdp2": {"engine": "fsdp2", "shard": 2},
    "zero 3": {"engine": "zero", "shard": 2, "zero": ZERO_3},
}


def make_head(*, dtype=torch.float64, bias=False):
    torch.manual_seed(1)
    return nn.Linear(WIDTH, VOCABULARY, bias=bias).to(dtype)


def make_tokens(num_tokens, *, dtype=torch.float64):
    random = torch.Generator().manual_seed(2)
    hidden = 3 * torch.randn(num_tokens, WIDTH, generator=random, dtype=torch.float64)
    targets = torch.randint(0, VOCABULARY, (num_tokens,), generator=random)
    return hidden.to(dtype).requires_grad_(), targets


def run(head, hidden, targets, *, chunk_tokens, weight=0.3, label_smoothing=0.0):
    """Losses, and the gradients of `weight` times their sum."""
    if chunk_tokens:
        options = MemoryOptions(loss="chunked", loss_chunk_tokens=chunk_tokens)
        make_losses(head, options=options, label_smoothing=label_smoothing)
        total, losses = head(hidden, targets_L=targets)
    else:
        logits = head(hidden)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        losses = functional.cross_entropy(
            wide, targets, reduction="none", label_smoothing=label_smoothing
        )
        total = losses.sum()
    (weight * total).backward()
    return total.detach(), losses.detach(), hidden.grad, head.weight.grad


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 40, 1000])
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_equal_to_whole_logits_in_float64(chunk_tokens, num_tokens, label_smoothing):
    smooth = {"label_smoothing": label_smoothing}
    expected = run(make_head(), *make_tokens(num_tokens), chunk_tokens=0, **smooth)
    found = run(make_head(), *make_tokens(num_tokens), chunk_tokens=chunk_tokens, **smooth)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float64
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True], ids=["weights in half", "autocast"])
def test_halves_are_no_further_from_the_truth_than_whole_logits(dtype, autocast):
    """The truth is float64's gradient of the same rounded weights and hidden states."""
    head, (hidden, targets) = make_head(dtype=dtype), make_tokens(400, dtype=dtype)
    rounded = hidden.detach()
    truth = run(
        make_head().to(dtype).to(torch.float64),
        rounded.double().requires_grad_(),
        targets,
        chunk_tokens=0,
    )
    if autocast:
        head, hidden = head.float(), rounded.float().requires_grad_()
    errors = []
    for chunk_tokens in (0, 64):
        head.zero_grad()
        hidden.grad = None
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            found = run(head, hidden, targets, chunk_tokens=chunk_tokens)
        assert found[3].dtype == head.weight.dtype
        errors.append(
            [
                float(torch.linalg.vector_norm(a.double() - b) / torch.linalg.vector_norm(b))
                for a, b in zip(found, truth, strict=True)
            ]
        )
    theirs, ours = errors
    assert all(a <= 1.05 * b + 1e-6 for a, b in zip(ours, theirs, strict=True)), errors
    assert max(theirs) < 0.02


def test_fp16_does_not_overflow_within_the_head():
    """2,000 tokens with one target: the weight's gradient is 80,000 before its mean is taken."""
    head = make_head(dtype=torch.float32)
    nn.init.zeros_(head.weight)
    hidden = torch.full((2000, WIDTH), 40.0, requires_grad=True)
    targets = torch.zeros(2000, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.float16):
        found = run(head, hidden, targets, chunk_tokens=2000, weight=1 / 2000)
    expected = 40 * (1 / VOCABULARY - 1)
    torch.testing.assert_close(found[3][0], torch.full((WIDTH,), expected), rtol=2e-3, atol=0)


def test_what_is_frozen_gets_no_gradient():
    head, (hidden, targets) = make_head(), make_tokens(9)
    expected = run(make_head(), *make_tokens(9), chunk_tokens=0)
    head.weight.requires_grad_(False)
    found = run(head, hidden, targets, chunk_tokens=4)
    assert found[3] is None
    torch.testing.assert_close(found[2], expected[2], rtol=1e-12, atol=1e-12)
    head, (hidden, targets) = make_head(), make_tokens(9)
    found = run(head, hidden.detach(), targets, chunk_tokens=4)
    assert found[2] is None
    torch.testing.assert_close(found[3], expected[3], rtol=1e-12, atol=1e-12)


def test_without_targets_the_head_is_as_before():
    head, (hidden, _) = make_head(), make_tokens(5)
    expected = head(hidden)
    make_losses(head, options=MemoryOptions(loss="chunked"))
    assert torch.equal(head(hidden), expected)


@pytest.mark.parametrize("loss", ["whole", "chunked"])
def test_labels_are_smoothed_in_training_and_never_in_evaluation(loss):
    options = MemoryOptions(loss=loss, loss_chunk_tokens=5)
    built = build(TINY_MODEL, tokens=TOKENS, image=IMAGE, seed=5)
    module = LossModule(built, options=options, label_smoothing=0.2)
    inputs = make_inputs()
    hidden = built.model(
        input_ids=inputs["input_ids"],
        position_ids=inputs["position_ids"],
        pixel_values=inputs["pixel_values"],
        image_grid_thw=inputs["grid_thw"],
        use_cache=False,
    ).last_hidden_state
    logits = built.lm_head(hidden[:, :-1]).flatten(0, 1)
    labels = inputs["labels"][:, 1:].flatten()
    for is_training, smoothing in ((True, 0.2), (False, 0.0)):
        found, by_source = module.train(is_training)(**inputs)
        expected = functional.cross_entropy(
            logits, labels, reduction="sum", label_smoothing=smoothing
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(by_source.sum(), expected, rtol=1e-5, atol=0)


def test_fused_does_not_smooth_labels():
    with pytest.raises(LayoutError, match=r"label_smoothing is 0.1.*label_smoothing to 0"):
        make_losses(make_head(), options=MemoryOptions(loss="fused"), label_smoothing=0.1)


def test_a_head_that_it_is_not_built_for_is_refused():
    with pytest.raises(LayoutError, match=r"loss is chunked.*without bias.*to whole"):
        make_losses(make_head(bias=True), options=MemoryOptions(loss="chunked"))


@pytest.mark.skipif("liger_kernel" in sys.modules, reason="Liger's kernels are there")
def test_fused_without_ligers_kernels_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(LayoutError, match=r"Liger's kernels cannot be imported.*chunked"):
        make_losses(make_head(), options=MemoryOptions(loss="fused"))


def test_fused_on_a_cpu_is_refused_before_anything_starts():
    fused = Layout(memory=MemoryOptions(loss="fused"))
    setting = Setting(
        model_shape=inspect(TINY_MODEL),
        cluster=Cluster(
            num_nodes=1,
            num_devices_per_node=1,
            device=Device(kind="cpu", name="a CPU", memory_bytes=10**9, flops_per_s={}),
            num_cores_per_node=2,
            host_memory_bytes=10**9,
        ),
        num_micro_batches=8,
        group=1,
        global_batch=8,
    )
    assert "set plan.layout.memory.loss to chunked" in (refusal(fused, setting=setting) or "")
    assert refusal(Layout(), setting=setting) is None


@pytest.mark.gpu
def test_ligers_kernel_is_near_whole_logits():
    pytest.importorskip("liger_kernel")
    head = make_head(dtype=torch.float32).cuda()
    hidden, targets = (each.detach().cuda() for each in make_tokens(40, dtype=torch.float32))
    hidden.requires_grad_()
    expected = run(head, hidden, targets, chunk_tokens=0)
    head.weight.grad = hidden.grad = None
    make_losses(head, options=MemoryOptions(loss="fused"))
    total, losses = head(hidden, targets_L=targets)
    (0.3 * total).backward()
    found = (total.detach(), losses, hidden.grad, head.weight.grad)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_in_chunks_follows_whole(tied):
    results = []
    for options in ({}, {"loss": "chunked", "loss_chunk_tokens": 5}):
        spec = ModelSpec(sizes=TINY_MODEL.sizes, tie_word_embeddings=tied)
        model = build(spec, tokens=TOKENS, image=IMAGE, seed=5).double()
        module = LossModule(model, num_sources=2, options=MemoryOptions(**options))
        calls = []
        model.lm_head.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        inputs = make_inputs()
        inputs["pixel_values"] = inputs["pixel_values"].double()
        inputs["source_ids"][1] = 1
        total, by_source = module(**inputs)
        total.backward()
        assert len(calls) == 1, "hooks of the head see one call, whatever the number of chunks"
        results.append((total.detach(), by_source, *(p.grad for p in model.parameters())))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.fixture
def live_bytes(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from _live import LiveBytes

    return LiveBytes


def test_nothing_is_made_for_a_gradient_that_nobody_wants(live_bytes):
    model = build(TINY_MODEL, tokens=TOKENS, image=IMAGE, seed=5)
    module = LossModule(model, options=MemoryOptions(loss="chunked", loss_chunk_tokens=5))
    expected = LossModule(build(TINY_MODEL, tokens=TOKENS, image=IMAGE, seed=5))
    with torch.no_grad():
        found = module(**make_inputs())
        torch.testing.assert_close(found, expected(**make_inputs()))
    assert not found[0].requires_grad
    head = nn.Linear(256, 4096, bias=False)
    make_losses(head, options=MemoryOptions(loss="chunked", loss_chunk_tokens=8))
    with torch.no_grad(), live_bytes() as live:
        head(torch.zeros(16, 256), targets_L=torch.zeros(16, dtype=torch.int64))
    assert live.peak < 4096 * 256 * 4 / 8, "a gradient of the weights was made"


def test_chunks_hold_one_chunks_logits(live_bytes):
    """512 labels of 4,096 words: whole holds logits, log-probabilities and their gradient."""

    def peak(chunk_tokens):
        head = nn.Linear(8, 4096, bias=False)
        hidden = torch.randn(512, 8, requires_grad=True)
        targets = torch.randint(0, 4096, (512,))
        with live_bytes() as live:
            run(head, hidden, targets, chunk_tokens=chunk_tokens)
        return live.peak

    logits = 512 * 4096 * 4
    assert peak(0) >= 2 * logits
    # One chunk's logits, and the gradient of the weights.
    assert peak(64) <= logits / 8 + 4096 * 8 * 4 + 100_000


def unequal(*, engine, options, labels_of):
    """Train a step on ranks with so many labels each; return the whole gradient and the loss."""
    import torch.distributed as dist

    from diptych.model.families import units
    from diptych.parallel.mesh import World, gather_numbers
    from diptych.parallel.spread import spread

    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, device=torch.device("cpu"))
    layout = Layout(**LAYOUTS[engine], memory=MemoryOptions(**options))
    model = build(TINY_MODEL, tokens=TOKENS, image=IMAGE, seed=5)
    dtype = torch.float32 if layout.engine == "zero" else torch.float64
    made = spread(
        LossModule(model, options=layout.memory).to(dtype),
        model=model,
        units=units(model),
        layout=layout,
        world=world,
        build_optimizer=lambda each: torch.optim.AdamW(each.parameters()),
    )
    inputs = make_inputs()
    inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
    inputs["labels"][0] = -100
    inputs["labels"][1, : 24 - labels_of[rank]] = -100
    made.module.train()
    # Twice: what hangs only when ranks have come apart hangs in the second.
    for is_last in (False, True):
        with made.micro_batch(is_last=is_last):
            loss = made.module(**inputs)[0]
            made.backward(loss, weight=1.0)
    total = gather_numbers([float(loss.detach())], world=world).sum()
    return np.concatenate(whole_gradients(made)), float(total)


@pytest.mark.parametrize("engine", LAYOUTS)
@pytest.mark.parametrize("labels_of", [(13, 2), (9, 0)], ids=["unequal", "none on one rank"])
def test_ranks_with_unequal_labels_follow_whole(ranks, engine, labels_of):
    tolerance = 1e-6 if engine == "zero 3" else 1e-12
    gradient, total = ranks(2).run(unequal, engine=engine, options={}, labels_of=labels_of)[0]
    chunked = {"loss": "chunked", "loss_chunk_tokens": 4}
    for ours, our_total in ranks(2).run(
        unequal, engine=engine, options=chunked, labels_of=labels_of
    ):
        assert our_total == pytest.approx(total, rel=tolerance)
        assert np.linalg.norm(ours - gradient) <= tolerance * np.linalg.norm(gradient)
    assert np.linalg.norm(gradient) > 0
