"""An image that stands alone in one conversation and among others in the next: its tiles differ."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from diptych.core.records import ImageRef, Message, Sample
from diptych.data.batcher import Batcher
from diptych.data.shards.reader import StoredSample


def _stored(data, *, num_images):
    image = ImageRef(path="a.png", width_px=80, height_px=40, format="PNG")
    messages = (
        Message(role="user", text="<image>\n" * num_images + "What is it?"),
        Message(role="assistant", text="Noise"),
    )
    sample = Sample(
        key=f"toy/{num_images}",
        source="toy",
        split="train",
        messages=messages,
        images=(image,) * num_images,
    )
    return StoredSample(sample=sample, images=[data] * num_images, content_hash="")


def test_cut_images_are_kept_by_how_they_are_cut(prepared, tmp_path):
    if prepared.info.image.kind == "native":
        pytest.skip("patches are in another order before they are normalised")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 80, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    corpus = prepared.corpus
    batcher = Batcher(
        shards=corpus.shards,
        manifest=corpus.manifest,
        processor=corpus.processor,
        split="train",
        image_cache=tmp_path,
        image_cache_bytes=1 << 24,
    )
    theirs = [
        prepared.processor.image_processor(
            [[Image.fromarray(pixels)] * number],
            do_rescale=False,
            do_normalize=False,
            return_tensors="np",
            **getattr(prepared.processor, "images_kwargs", {}),
        )["pixel_values"]
        for number in (1, 2)
    ]
    for _ in range(2):
        (alone,) = batcher.cut(_stored(file.getvalue(), num_images=1))
        first, second = batcher.cut(_stored(file.getvalue(), num_images=2))
        assert np.array_equal(alone.ravel(), theirs[0].ravel())
        assert np.array_equal(np.concatenate([first, second]).ravel(), theirs[1].ravel())
    num_kept = sum(path.is_file() for path in tmp_path.rglob("*") if path.name != "num_bytes")
    assert num_kept == (2 if prepared.info.family == "llava_onevision" else 1)
