"""Tokens, patches and pixels are those of transformers' own processor, whatever an image's size."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL import Image

from diptych.core.records import Message
from diptych.data.chat import ChatTokenizer, to_chat
from diptych.data.collate import Ready, collate
from diptych.data.encode import encode
from diptych.data.images.patches import load_patcher
from diptych.model.families import torch_side

NUM_SIZES = 200


def _images(seed):
    """Draw one image, as often wide as high, small as large."""
    draw = random.Random(seed)
    width, height = (round(2 ** draw.uniform(3, 8)) for _ in range(2))
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return [pixels]


def _theirs(processor, messages, images):
    return processor.apply_chat_template(
        to_chat(messages),
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"images": [Image.fromarray(image) for image in images]},
    )


def _ours(prepared, messages, images):
    tokenizer = ChatTokenizer(prepared.corpus.processor)
    patcher = load_patcher(prepared.corpus.processor, image=prepared.info.image)
    sizes = [(image.shape[1], image.shape[0]) for image in images]
    encoded = encode(messages, images_wh=sizes, tokenizer=tokenizer, info=prepared.info)
    patches = tuple(patcher.cut(image, num_images=len(images)) for image in images)
    ready = Ready(encoded=encoded, patches=patches, source=0)
    return encoded, collate([[ready]], patcher=patcher, info=prepared.info, num_sources=1)


def _inputs(prepared, batch):
    return torch_side(prepared.info.family).inputs(
        input_ids_BS=batch.input_ids_BS,
        position_ids_3BS=batch.position_ids_3BS,
        pixel_values_PD=batch.pixel_values_PD,
        grid_thw_I3=batch.grid_thw_I3,
        mask_B1SS=None,
    )


def test_an_image_of_any_size_becomes_what_the_processor_makes_of_it(prepared):
    messages = (
        Message(role="user", text="<image>\nWhich number?"),
        Message(role="assistant", text="42"),
    )
    for seed in range(NUM_SIZES):
        images = _images(seed)
        theirs = _theirs(prepared.processor, messages, images)
        encoded, batch = _ours(prepared, messages, images)
        assert encoded.input_ids.tolist() == theirs["input_ids"][0].tolist(), images[0].shape
        pixels = _inputs(prepared, batch)["pixel_values"]
        assert torch.equal(pixels.flatten(), theirs["pixel_values"].flatten()), images[0].shape


def test_several_images_stand_where_their_placeholders_do(prepared):
    messages = (
        Message(role="system", text="Answer shortly."),
        Message(role="user", text="<image>\n<image>\nWhich is larger?"),
        Message(role="assistant", text="The first."),
        Message(role="user", text="And of these? <image>"),
        Message(role="assistant", text="The same."),
    )
    images = [_images(seed)[0] for seed in (1, 2, 3)]
    theirs = _theirs(prepared.processor, messages, images)
    encoded, batch = _ours(prepared, messages, images)
    assert encoded.input_ids.tolist() == theirs["input_ids"][0].tolist()
    pixels = _inputs(prepared, batch)["pixel_values"]
    assert torch.equal(pixels.flatten(), theirs["pixel_values"].flatten())
    labelled = encoded.labels[encoded.labels != -100].tolist()
    said = prepared.processor.tokenizer.decode(labelled)
    end = prepared.processor.tokenizer.eos_token
    assert said == f"The first.{end}The same.{end}"


@pytest.mark.parametrize("num_images", [0, 1, 2])
def test_labels_are_what_the_template_marks(prepared, num_images):
    text = "<image>\n" * num_images + "Which number?"
    messages = (
        Message(role="user", text=text),
        Message(role="assistant", text="42, of course"),
        Message(role="user", text="Sure?"),
        Message(role="assistant", text="No"),
    )
    images = [_images(seed)[0] for seed in range(num_images)]
    extra = {"images": [Image.fromarray(image) for image in images]} if images else {}
    made = prepared.processor.apply_chat_template(
        to_chat(messages),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        return_tensors="np",
        processor_kwargs=extra,
    )
    encoded, _ = _ours(prepared, messages, images) if images else (_text(prepared, messages), None)
    marked = np.where(made["assistant_masks"] == 1, made["input_ids"], -100)
    np.testing.assert_array_equal(encoded.labels, marked[0])


def _text(prepared, messages):
    tokenizer = ChatTokenizer(prepared.corpus.processor)
    return encode(messages, images_wh=[], tokenizer=tokenizer, info=prepared.info)
