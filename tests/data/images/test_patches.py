"""Patches are bitwise those of transformers' image processor, cut and normalised apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessor

from diptych.data.images.patches import Patcher

PROCESSORS = {
    "small": {"patch_size": 8, "temporal_patch_size": 1, "low": 256, "high": 65_536},
    "qwen": {"patch_size": 14, "temporal_patch_size": 2, "low": 56 * 56, "high": 28 * 28 * 64},
    "odd": {"patch_size": 5, "temporal_patch_size": 3, "low": 100, "high": 10_000},
}
SHAPES = [(1, 1), (1, 7), (3, 3), (4, 40), (3, 90), (16, 16), (17, 33), (300, 280), (16, 16)]


@pytest.fixture(params=PROCESSORS)
def image_processor(request):
    settings = dict(PROCESSORS[request.param])
    areas = {"shortest_edge": settings.pop("low"), "longest_edge": settings.pop("high")}
    mean, std = [0.48, 0.45, 0.40], [0.26, 0.27, 0.28]
    return Qwen2VLImageProcessor(size=areas, image_mean=mean, image_std=std, **settings)


def make_images():
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in SHAPES]
    images[3].setflags(write=False)
    return images


def test_images_of_any_shape_are_bitwise_those_of_transformers(image_processor):
    images = make_images()
    patcher = Patcher(image_processor)
    cut = [patcher.cut(image) for image in images]
    made = image_processor([Image.fromarray(image) for image in images], return_tensors="pt")
    assert all(part.dtype == np.uint8 for part in cut)
    assert [len(part) for part in cut] == made["image_grid_thw"].prod(dim=1).tolist()
    assert torch.equal(patcher.normalise(cut), made["pixel_values"])


def test_patches_are_as_small_as_the_resized_image(image_processor):
    patcher = Patcher(image_processor)
    for image in make_images():
        part = patcher.cut(image)
        made = image_processor([Image.fromarray(image)], return_tensors="pt")
        frames = image_processor.temporal_patch_size
        assert part.nbytes == made["pixel_values"].numel() // frames


def test_without_resizing_and_without_normalising(image_processor):
    side = image_processor.patch_size * image_processor.merge_size
    image = np.random.default_rng(1).integers(0, 256, (2 * side, 3 * side, 3), dtype=np.uint8)
    image_processor.do_resize = image_processor.do_normalize = False
    patcher = Patcher(image_processor)
    made = image_processor([Image.fromarray(image)], return_tensors="pt")
    assert torch.equal(patcher.normalise([patcher.cut(image)]), made["pixel_values"])


def test_a_filler_is_grey_and_as_wide_as_an_image(image_processor):
    filler = Patcher(image_processor).filler(4)
    image = Image.new("RGB", (image_processor.patch_size * 2,) * 2)
    image_processor.size = {"shortest_edge": 1, "longest_edge": image.width**2}
    made = image_processor([image], return_tensors="pt")
    assert filler.shape == made["pixel_values"].shape
    assert not filler.any()
