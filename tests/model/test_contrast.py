"""The sigmoid contrastive loss against its formula, pair by pair, and what it moves in a model."""

from __future__ import annotations

import math
import weakref
from functools import partial

import numpy as np
import pytest
import torch

from diptych.core.errors import ConfigError
from diptych.core.records import (
    CompileOptions,
    ContrastSpec,
    ImageSettings,
    MemoryOptions,
    TokenIds,
)
from diptych.model.assemble import build
from diptych.model.contrast import sum_of_pairs
from diptych.model.families import towers, units
from diptych.model.features import freeze
from diptych.parallel import compiled, recompute
from diptych.train.step import LossModule
from tests.conftest import TINY_MODEL

TOKENS = TokenIds(num_tokens=500, pad=0, eos=1, image=2, video=3, vision_start=4, vision_end=5)
IMAGE = ImageSettings(patch_px=8, merge=2, temporal_patch=1, min_area_px=256, max_area_px=65536)
SPEC = ContrastSpec(weight=0.5, scale=7.0, bias=-2.0)

# Segments of a row, 0 is padding; I is an image's token, L a label, . neither.
ROWS = (
    ("1111112222333334444", "II.II.I.LL.LII.I.LL"),
    ("1111122223333300000", "I.LL.IILL...LL..III"),
    ("1111111110000000000", "II..LLIIL.......I.."),
    ("0000000000000000000", "................III"),
)
"""In the first, sample 1 has no label; in the second, 3 has no image; the last is a filler."""
PAIRED = ({2, 3, 4}, {1, 2}, {1}, set())


def drawn(*, dtype=torch.float64, width=6):
    shape = (len(ROWS), len(ROWS[0][0]), width)
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    marks = np.array([list(marks) for _, marks in ROWS])
    return {
        "inputs_BSD": inputs.to(dtype).requires_grad_(),
        "is_image_BS": torch.from_numpy(marks == "I"),
        "is_label_BS": torch.from_numpy(marks == "L"),
        "segment_ids_BS": torch.tensor([list(map(int, row)) for row, _ in ROWS], dtype=torch.int32),
    }


def by_formula(images, texts, *, scale, bias):
    """Sum -log sigmoid(z (t x.y + b)) over all pairs of a row; z is 1 where they belong, else -1.

    Zhai et al. 2023, section 3.2, with plain numbers; images and texts are means, not normalised.
    """
    total = 0.0
    for i, x in enumerate(images):
        for j, y in enumerate(texts):
            cosine = sum(a * b for a, b in zip(x, y, strict=True)) / math.sqrt(
                sum(a * a for a in x) * sum(b * b for b in y)
            )
            z = 1 if i == j else -1
            total -= math.log(1 / (1 + math.exp(-z * (scale * cosine + bias))))
    return total


def expected_of(inputs, *, rows=(0, 1, 2, 3), scale=SPEC.scale, bias=SPEC.bias):
    total = 0.0
    for row in rows:
        segments, marks = ROWS[row]
        means = {
            (number, kind): np.mean(
                [
                    inputs[row, at].detach().double().numpy()
                    for at, mark in enumerate(marks)
                    if mark == kind and segments[at] == str(number)
                ],
                axis=0,
            ).tolist()
            for number in PAIRED[row]
            for kind in "IL"
        }
        images, texts = ([means[number, kind] for number in PAIRED[row]] for kind in "IL")
        total += by_formula(images, texts, scale=scale, bias=bias)
    return total


@pytest.mark.parametrize(("scale", "bias"), [(7.0, -2.0), (10.0, -5.0), (0.5, 3.0)])
def test_it_is_the_papers_sum_over_pairs(scale, bias):
    given = drawn()
    found = sum_of_pairs(**given, scale=scale, bias=bias)
    expected = expected_of(given["inputs_BSD"], scale=scale, bias=bias)
    assert found.item() == pytest.approx(expected, rel=1e-12)


def test_images_move_and_words_padding_and_fillers_stay():
    given = drawn()
    sum_of_pairs(**given, scale=7.0, bias=-2.0).backward()
    moved = given["inputs_BSD"].grad.abs().sum(dim=2) > 0
    for row, (segments, marks) in enumerate(ROWS):
        paired = [segment != "0" and int(segment) in PAIRED[row] for segment in segments]
        expected = [mark == "I" and ours for mark, ours in zip(marks, paired, strict=True)]
        assert moved[row].tolist() == expected


def test_the_gradient_is_that_of_differences():
    given = drawn()
    loss = partial(
        sum_of_pairs,
        **{key: given[key] for key in given if key != "inputs_BSD"},
        scale=7.0,
        bias=-2.0,
    )
    # Words are constants of the gradient, not of the function, so only images are varied.
    images = given["is_image_BS"][:, :, None]
    fixed = given["inputs_BSD"].detach().clone()
    torch.autograd.gradcheck(
        lambda inputs: loss(torch.where(images, inputs, fixed)), given["inputs_BSD"]
    )


def test_a_row_of_one_sample_has_its_pair_alone():
    given = {name: each[2:3] for name, each in drawn().items()}
    found = sum_of_pairs(**given, scale=7.0, bias=-2.0)
    assert found.item() == pytest.approx(expected_of(drawn()["inputs_BSD"], rows=[2]), rel=1e-12)


@pytest.mark.parametrize("segment", [0, 1])
def test_without_a_pair_it_is_zero_and_so_is_its_gradient(segment):
    """Where the row is a filler alone, and where its one sample has neither image nor label."""
    given = {name: each[3:4] for name, each in drawn().items()}
    given["inputs_BSD"] = given["inputs_BSD"].detach().requires_grad_()
    given["segment_ids_BS"] = torch.full_like(given["segment_ids_BS"], segment)
    given["is_image_BS"] = given["is_image_BS"] & (segment == 0)
    loss = sum_of_pairs(**given, scale=7.0, bias=-2.0)
    loss.backward()
    assert loss.item() == 0
    assert not given["inputs_BSD"].grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_summed_in_fp32(dtype):
    given = drawn(dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sum_of_pairs(**given, scale=7.0, bias=-2.0)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected_of(given["inputs_BSD"]), rel=1e-6)
    found.backward()
    assert given["inputs_BSD"].grad.dtype == dtype


def make_inputs(numbers=(0, 1, 2, 3), *, width=40):
    """One packed row: samples 0 and 1 have one image, 2 has two, 3 has none."""
    random = torch.Generator().manual_seed(1)
    parts = []
    for number in range(4):
        num_images = (1, 1, 2, 0)[number]
        ids = torch.randint(10, 400, (7 + 3 * num_images,), generator=random)
        for image in range(num_images):
            ids[1 + 3 * image : 3 + 3 * image] = TOKENS.image
        labels = torch.where(torch.arange(len(ids)) >= len(ids) - 4, ids, -100)
        patches = torch.randn(8 * num_images, 3 * 8 * 8, generator=random, dtype=torch.float64)
        parts.append((ids, labels, torch.arange(len(ids)), patches))
    chosen = [parts[number] for number in numbers]
    ids, labels, positions, patches = (torch.cat(each) for each in zip(*chosen, strict=True))
    segments = torch.cat([torch.full((len(p[0]),), n) for n, p in enumerate(chosen, start=1)])
    pad = partial(torch.nn.functional.pad, pad=(0, width - len(ids)))
    return {
        "input_ids": pad(ids)[None],
        "labels": pad(labels, value=-100)[None],
        "position_ids": pad(positions).expand(3, 1, width),
        "pixel_values": patches,
        "grid_thw": torch.tensor([[1, 2, 4]] * (len(patches) // 8)),
        "source_ids": torch.zeros(1, width, dtype=torch.int16),
        "segment_ids": pad(segments)[None].to(torch.int32),
    }


def make_module(*, contrast=SPEC, frozen=(), dtype=torch.float64):
    model = build(TINY_MODEL, tokens=TOKENS, image=IMAGE, seed=5).to(dtype)
    freeze(model, frozen=frozen)
    return LossModule(model, contrast=contrast).train()


def run(module, inputs, *, labels_per_pair=3.0):
    module.zero_grad()
    loss, _, *both = module(**inputs, labels_per_pair=labels_per_pair)
    loss.backward()
    gradient = {name: each.grad for name, each in module.model.named_parameters()}
    return loss.detach(), both, gradient


def test_a_model_pulls_its_features_to_its_embedding_of_the_labels():
    module, inputs = make_module(), make_inputs()
    body = module.model.model
    loss, both, _ = run(module, inputs, labels_per_pair=3.0)
    language, vision = both[0].tolist()
    with torch.no_grad():
        words = body.get_input_embeddings()(inputs["input_ids"])[0]
        found = body.get_image_features(inputs["pixel_values"], inputs["grid_thw"])
        features = torch.cat(list(found.pooler_output))
    labelled = (inputs["labels"] != -100)[0]
    segments = inputs["segment_ids"][0]
    # Of two tokens an image: the third sample has two images.
    images = [part.mean(dim=0).tolist() for part in features.split([2, 2, 4])]
    texts = [words[labelled & (segments == n)].mean(dim=0).tolist() for n in (1, 2, 3)]
    expected = by_formula(images, texts, scale=SPEC.scale, bias=SPEC.bias)
    assert vision == pytest.approx(expected, rel=1e-9)
    assert loss.item() == pytest.approx(language + SPEC.weight * 3.0 * expected, rel=1e-9)
    plain, _, _ = run(make_module(contrast=None), inputs)
    assert language == pytest.approx(plain.item(), rel=1e-12)


def test_it_moves_what_sees_and_neither_words_nor_the_language_model():
    inputs = make_inputs()
    _, _, gradient = run(make_module(), inputs)
    _, _, plain = run(make_module(contrast=None), inputs)
    of = towers(make_module().model)
    for name, each in gradient.items():
        if of[name] == "language":
            torch.testing.assert_close(each, plain[name], rtol=1e-12, atol=1e-14)
    for tower in ("vision", "connector"):
        moved = [
            name for name in of if of[name] == tower and not _near(gradient[name], plain[name])
        ]
        # DeepStack's merger feeds later layers alone.
        still = {name for name in of if of[name] == tower} - set(moved)
        assert moved
        assert all("deepstack" in name or name.endswith("k.bias") for name in still), still


def _near(one, other):
    return torch.allclose(one, other, rtol=1e-6, atol=1e-12)


def test_it_is_the_sum_over_rows_and_a_sample_without_an_image_is_no_negative():
    module = make_module()
    alone = run(module, make_inputs([0]))[1][0][1]
    beside_text = run(module, make_inputs([0, 3]))[1][0][1]
    torch.testing.assert_close(beside_text, alone)
    pair = run(module, make_inputs([0, 1]))[1][0][1]
    other = run(module, make_inputs([0, 2]))[1][0][1]
    assert pair > alone
    assert pair != other


def test_in_evaluation_the_loss_is_that_of_language():
    module, inputs = make_module().eval(), make_inputs()
    found = module(**inputs)
    assert len(found) == 2
    expected = make_module(contrast=None).eval()(**inputs)
    torch.testing.assert_close(found, expected)
    # Held-out rows are one sample each.
    assert len(module(**{**make_inputs([0]), "segment_ids": None})) == 2


def test_nothing_is_kept_of_a_step():
    module = make_module()
    block = module.model.model.language_model.layers[0]
    seen = []
    block.register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0])))
    loss, *_ = module(**make_inputs(), labels_per_pair=1.0)
    assert len(seen) == 1
    assert seen[0]() is None, "the graph holds what it needs, and nobody else"
    loss.backward()


@pytest.mark.parametrize("how", ["blocks", "operators"])
def test_recompute_changes_nothing(how):
    inputs = make_inputs()
    module = make_module()
    recompute.apply(units(module.model), options=MemoryOptions(recompute=how))
    _check_same(run(module, inputs), run(make_module(), inputs))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_blocks_change_nothing():
    inputs = make_inputs()
    module = make_module()
    options = CompileOptions(blocks=("language",))
    compiled.apply(units(module.model), options=options, backend="eager")
    _check_same(run(module, inputs), run(make_module(), inputs))


def _check_same(found, expected):
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])
    for name, each in expected[2].items():
        torch.testing.assert_close(found[2][name], each)


def test_what_no_image_can_move_is_refused():
    patterns = ("model.visual.*",)
    with pytest.raises(ConfigError, match=r"nothing trains that an image passes through.*freeze"):
        make_module(frozen=patterns)
    # The connector learns alone.
    assert run(make_module(frozen=("vision", "language")), make_inputs())[1]
