"""What recomputing and offloading save in memory and cost in time, beside a step that holds all.

Peers, all on the same model (12 decoder layers, 4 vision blocks), weights and batch: no recompute;
every block; every second block; the operators that are cheap; activations offloaded; the loss in
chunks. Gradients must be equal. The variants take turns in one process on one thread; a step's time
is the processor time of forward and backward, so that what else the machine does counts less, and
what is compared is the median, over turns, of each variant's time by that of no recompute.

The peak is the most bytes of tensors that live at once in forward and backward (see `_live`), in a
step that has its weights and gradients already: activations, and what is in flight with them. What
is offloaded would be in the host's memory beside a GPU: on a CPU, whose memory is the only one, its
copies are not counted. The goal is about every block: at most 40% of the peak for 35% more time.

Beside it, raw: the head alone at 32,768 words and 4,096 label tokens, whole and in chunks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from _live import LiveBytes
from diptych.core.records import ImageSettings, Layout, MemoryOptions, ModelSpec, TokenIds
from diptych.model.assemble import build
from diptych.model.families import units
from diptych.model.loss import make_losses
from diptych.parallel import activations, recompute
from diptych.train.step import LossModule
from run import Measured

MAX_PEAK, MAX_TIME = 0.40, 1.35
NUM_ROUNDS = 15
NUM_WARMUPS = 2
IMAGE = ImageSettings(patch_px=8, merge=2, temporal_patch=1, min_area_px=256, max_area_px=65536)
TOKENS = TokenIds(num_tokens=1024, pad=0, eos=1, image=2, video=3, vision_start=4, vision_end=5)
NUM_ROWS, NUM_TOKENS, NUM_LABELS, GRID = 2, 256, 64, (16, 16)
SIZES: dict[str, dict[str, Any]] = {
    "text": {
        "vocab_size": 1024,
        "hidden_size": 192,
        "intermediate_size": 576,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 32,
    },
    "vision": {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_heads": 4,
        "patch_size": 8,
        "temporal_patch_size": 1,
        "deepstack_visual_indexes": [1, 2],
        "num_position_embeddings": 256,
    },
}
BLOCKS: dict[str, Any] = {"recompute": "blocks"}
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {},
    "blocks": BLOCKS,
    "every second": {**BLOCKS, "vision_every": 2, "language_every": 2},
    "operators": {"recompute": "operators"},
    "offload": {"offload_activations": True},
    "blocks, offload": {**BLOCKS, "offload_activations": True},
    "chunked": {"loss": "chunked", "loss_chunk_tokens": 32},
}
HEAD_WIDTH, HEAD_WORDS, HEAD_LABELS, HEAD_CHUNK, HEAD_ROUNDS = 64, 32_768, 4_096, 512, 3


def measure(options: argparse.Namespace) -> Measured:
    """Let the variants take turns, then the heads."""
    torch.set_num_threads(1)
    modules = {name: make_module(**options) for name, options in VARIANTS.items()}
    inputs = make_inputs()
    peaks = {name: peak_bytes(lambda m=module: step(m, inputs)) for name, module in modules.items()}
    check_equal_gradients(modules)
    times = take_turns({name: lambda m=m: step(m, inputs) for name, m in modules.items()})
    return judge(peaks, times=times, head=measure_head())


def judge(
    peaks: dict[str, int], *, times: dict[str, list[float]], head: dict[str, Any]
) -> Measured:
    """Make the figures of all rounds."""
    peak = peaks["blocks"] / peaks["none"]
    added = relative(times, to="none")
    megabytes = {name: value / 1e6 for name, value in peaks.items()}
    return Measured(
        unit="MB",
        ours=megabytes.pop("blocks"),
        peers=megabytes,
        ratio=peak,
        goal=f"<= {MAX_PEAK} of the peak with none, in <= {MAX_TIME} of its time",
        met=peak <= MAX_PEAK and added["blocks"] <= MAX_TIME,
        raw={
            "peak_bytes": peaks,
            "peak_to_none": {name: value / peaks["none"] for name, value in peaks.items()},
            "time_to_none": added,
            "cpu_s": times,
            "head": head,
        },
    )


def relative(times: dict[str, list[float]], *, to: str) -> dict[str, float]:
    """Return each one's median, over turns, of its time by that of one of them."""
    return {
        name: statistics.median(mine / base for mine, base in zip(found, times[to], strict=True))
        for name, found in times.items()
    }


def make_module(**options: Any) -> LossModule:
    """Build the model, with its gradients there already."""
    memory = MemoryOptions(**options)
    model = build(ModelSpec(sizes=SIZES), tokens=TOKENS, image=IMAGE, seed=0)
    module = LossModule(model, options=memory).train()
    recompute.apply(units(model), options=memory)
    activations.apply(module, layout=Layout(memory=memory))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return module


def make_inputs() -> dict[str, torch.Tensor]:
    """Make rows of an image and text, with labels at their ends."""
    generator = torch.Generator().manual_seed(0)
    num_image_tokens = GRID[0] * GRID[1] // IMAGE.merge**2
    ids = torch.randint(10, TOKENS.num_tokens, (NUM_ROWS, NUM_TOKENS), generator=generator)
    ids[:, 1 : 1 + num_image_tokens] = TOKENS.image
    at_end = torch.arange(NUM_TOKENS) >= NUM_TOKENS - NUM_LABELS
    num_patches = NUM_ROWS * GRID[0] * GRID[1]
    return {
        "input_ids": ids,
        "labels": torch.where(at_end, ids, -100),
        "position_ids": torch.arange(NUM_TOKENS).expand(3, NUM_ROWS, NUM_TOKENS),
        "pixel_values": torch.randn(num_patches, 3 * IMAGE.patch_px**2, generator=generator),
        "grid_thw": torch.tensor([[1, *GRID]] * NUM_ROWS),
        "source_ids": torch.zeros((NUM_ROWS, NUM_TOKENS), dtype=torch.int16),
    }


def step(module: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    """Go forward and backward; gradients add up where they are."""
    module(**inputs)[0].backward()


def peak_bytes(work: Callable[[], None]) -> int:
    """Return the most bytes that live at once during some work, offloaded copies aside."""
    with LiveBytes() as live, _aside(live):
        work()
    return live.peak


@contextmanager
def _aside(live: LiveBytes):
    to_host = activations._Offload._to_host

    def left_out(offload: Any, tensor: torch.Tensor) -> torch.Tensor:
        copy = to_host(offload, tensor)
        live.leave_out(copy)
        return copy

    activations._Offload._to_host = left_out
    try:
        yield
    finally:
        activations._Offload._to_host = to_host


def check_equal_gradients(modules: dict[str, LossModule]) -> None:
    """Compare with no recompute: bit by bit, and the loss in chunks nearly so."""
    expected = list(modules["none"].parameters())
    for name, module in modules.items():
        for ours, theirs in zip(module.parameters(), expected, strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            if name == "chunked":
                difference = torch.linalg.vector_norm(ours.grad - theirs.grad)
                equal = difference <= 1e-4 * torch.linalg.vector_norm(theirs.grad) + 1e-5
            else:
                equal = torch.equal(ours.grad, theirs.grad)
            assert equal, f"a gradient of '{name}' differs"


def take_turns(works: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Do each work once a turn; return the processor time of each."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(NUM_WARMUPS + NUM_ROUNDS):
        for name, work in works.items():
            started = time.process_time()
            work()
            if number >= NUM_WARMUPS:
                times[name].append(time.process_time() - started)
    return times


def measure_head() -> dict[str, Any]:
    """Compare whole logits with chunks where there are many words and labels."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(HEAD_LABELS, HEAD_WIDTH, generator=generator, requires_grad=True)
    targets = torch.randint(0, HEAD_WORDS, (HEAD_LABELS,), generator=generator)
    heads = {name: nn.Linear(HEAD_WIDTH, HEAD_WORDS, bias=False) for name in ("whole", "chunked")}
    memory = MemoryOptions(loss="chunked", loss_chunk_tokens=HEAD_CHUNK)
    make_losses(heads["chunked"], options=memory)

    def whole() -> None:
        functional.cross_entropy(heads["whole"](hidden), targets, reduction="sum").backward()

    def chunked() -> None:
        heads["chunked"](hidden, targets_L=targets)[0].backward()

    works = {"whole": whole, "chunked": chunked}
    peaks = {name: peak_bytes(work) for name, work in works.items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(HEAD_ROUNDS):
        for name, work in works.items():
            started = time.process_time()
            work()
            times[name].append(time.process_time() - started)
    return {
        "peak_bytes": peaks,
        "peak_to_whole": peaks["chunked"] / peaks["whole"],
        "time_to_whole": relative(times, to="whole")["chunked"],
        "cpu_s": times,
    }


if __name__ == "__main__":
    from run import main

    main(["recompute"])
