"""The loss of packed rows and of sources, held against samples computed one by one."""

from __future__ import annotations

import pytest
import torch

from diptych.core.records import ImageSettings, TokenIds
from diptych.model.assemble import build
from diptych.train.step import LossModule
from tests.conftest import TINY_MODEL

TOKENS = TokenIds(num_tokens=500, pad=0, eos=1, image=2, video=3, vision_start=4, vision_end=5)
IMAGE = ImageSettings(patch_px=8, merge=2, temporal_patch=1, min_area_px=256, max_area_px=65536)
PATCH_WIDTH = 3 * 8 * 8
LENGTHS, GRID = (9, 7, 5), (2, 4)
"""The first two samples have an image of two tokens, the last has none."""


@pytest.fixture(scope="module")
def module():
    return LossModule(build(TINY_MODEL, tokens=TOKENS, image=IMAGE, seed=5), num_sources=2)


def _samples():
    random = torch.Generator().manual_seed(0)
    samples = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(10, 400, (length,), generator=random)
        if number < 2:
            ids[1:3] = TOKENS.image
        labels = ids.clone()
        labels[:4] = -100
        patches = torch.randn(8 if number < 2 else 0, PATCH_WIDTH, generator=random)
        samples.append((ids, labels, torch.arange(length), patches))
    return samples


def _inputs(samples, *, sources, pad_to):
    """One packed row."""
    ids, labels, positions, patches = (torch.cat(parts) for parts in zip(*samples, strict=True))
    lengths = [len(sample[0]) for sample in samples]
    numbers = torch.arange(len(samples))
    segments = torch.repeat_interleave(numbers + 1, torch.tensor(lengths))
    tokens_of = torch.repeat_interleave(torch.tensor(sources), torch.tensor(lengths))
    room = pad_to - len(ids)
    pad = torch.nn.functional.pad
    images = int(sum(len(sample[3]) for sample in samples) / 8)
    return {
        "input_ids": pad(ids, (0, room))[None],
        "labels": pad(labels, (0, room), value=-100)[None],
        "position_ids": pad(positions, (0, room)).expand(3, 1, pad_to),
        "pixel_values": patches,
        "grid_thw": torch.tensor([[1, *GRID]] * images).reshape(-1, 3),
        "source_ids": pad(tokens_of, (0, room), value=-1)[None].to(torch.int16),
        "segment_ids": pad(segments, (0, room))[None].to(torch.int32),
    }


def _gradient(module):
    found = [p.grad.reshape(-1) for p in module.parameters() if p.grad is not None]
    return torch.cat(found)


def test_a_packed_row_has_the_loss_and_gradient_of_its_samples(module):
    samples = _samples()
    module.zero_grad()
    packed, by_source = module(**_inputs(samples, sources=[0, 1, 0], pad_to=24))
    packed.backward()
    gradient = _gradient(module)
    module.zero_grad()
    alone = []
    for sample in samples[:2]:
        inputs = _inputs([sample], sources=[0], pad_to=len(sample[0]))
        alone.append(module(**{**inputs, "segment_ids": None})[0])
    # Without an image of its own the third needs a dummy, as in training.
    text = (*samples[2][:3], torch.zeros(8, PATCH_WIDTH))
    inputs = _inputs([text], sources=[0], pad_to=8)
    inputs["input_ids"][0, 6:] = TOKENS.image
    alone.append(module(**{**inputs, "segment_ids": None})[0])
    torch.stack(alone).sum().backward()
    torch.testing.assert_close(packed, torch.stack(alone).sum())
    expected = torch.stack([alone[0] + alone[2], alone[1]])
    torch.testing.assert_close(by_source, expected)
    difference = torch.linalg.vector_norm(gradient - _gradient(module))
    assert difference <= 1e-6 * torch.linalg.vector_norm(gradient)


def test_a_neighbour_in_the_row_changes_nothing(module):
    samples = _samples()
    labels = torch.full_like(samples[0][1], -100)
    only_second = [(samples[0][0], labels, *samples[0][2:]), samples[1]]
    other = [(samples[0][0].flip(0) * 0 + 77, labels, samples[0][2], samples[0][3][:0])]
    losses, gradients = [], []
    for first in (only_second[0], other[0]):
        module.zero_grad()
        loss, _ = module(**_inputs([first, only_second[1]], sources=[0, 0], pad_to=20))
        loss.backward()
        losses.append(loss.detach())
        # What the first sample alone reads gets a gradient of zero either way.
        gradients.append(_gradient(module))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)
