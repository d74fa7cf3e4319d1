"""Processors of InternVL and LLaVA-OneVision as the hub has them: loaded, described, encoded."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from diptych.core.errors import ConfigError
from diptych.core.records import Message, TileSettings
from diptych.data.chat import ChatTokenizer, to_chat
from diptych.data.collate import Ready, collate
from diptych.data.encode import encode
from diptych.data.fitted import tokenizer_of
from diptych.data.images.patches import load_patcher
from diptych.data.processor import ProcessorParams, fit, read_processor_info
from tests.data.test_processor import make_index

HUB_INTERNVL = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "{{ '<IMG_CONTEXT>\n' }}{% elif content['type'] == 'video' %}{{ '<video>\n' }}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n' }}{% endif %}"
)
HUB_ONEVISION = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + ' '}}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ '\n' + content['text'] }}{% endfor %}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ '\n' + content['text'] }}{% endgeneration %}{% endfor %}{% endif %}"
    "{{'<|im_end|>'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT = (
    Message(role="user", text="<image>\nWhich number is written here?"),
    Message(role="assistant", text="42"),
    Message(role="user", text="Sure?"),
    Message(role="assistant", text="Yes, 42"),
)


def fitted(folder, **params):
    return fit(make_index(folder), ProcessorParams(**params), str(folder / "fitted"))


def as_on_the_hub(folder, family):
    """Give a fitted processor the settings and the template of a released model."""
    from transformers import AutoProcessor

    if family == "internvl":
        source = fitted(folder, family=family, tile_px=448, patch_px=14)
        processor = AutoProcessor.from_pretrained(source, local_files_only=True)
        processor.image_processor.crop_to_patches = False
        processor.chat_template = HUB_INTERNVL
    else:
        source = fitted(folder, family=family, tile_px=384, patch_px=16)
        processor = AutoProcessor.from_pretrained(source, local_files_only=True)
        processor.num_image_tokens = 729
        processor.chat_template = HUB_ONEVISION
    processor.save_pretrained(folder / "hub")
    params = ProcessorParams(mode="load", source=str(folder / "hub"))
    return fit(make_index(folder), params, str(folder / "processor"))


@pytest.mark.parametrize("family", ["internvl", "llava_onevision"])
def test_a_released_processor_is_described_and_encoded_as_transformers_does(family, tmp_path):
    from transformers import AutoProcessor

    folder = as_on_the_hub(tmp_path, family)
    info = read_processor_info(folder)
    image = info.image
    assert isinstance(image, TileSettings)
    assert info.family == family
    if family == "internvl":
        assert (image.side_px, image.patch_px, image.tile_tokens) == (448, 14, 256)
        assert (image.min_tiles, image.max_tiles, image.thumbnail) == (1, 12, True)
    else:
        assert (image.side_px, image.patch_px, image.tile_tokens) == (384, 14, 729)
        assert (image.max_tiles, len(image.resolutions)) == (9, 36)
    pixels = np.random.default_rng(0).integers(0, 256, (500, 900, 3), dtype=np.uint8)
    processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    theirs = processor.apply_chat_template(
        to_chat(CHAT),
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"images": [Image.fromarray(pixels)]},
    )
    tokenizer, patcher = ChatTokenizer(folder), load_patcher(folder, image=image)
    encoded = encode(CHAT, images_wh=[(900, 500)], tokenizer=tokenizer, info=info)
    assert encoded.input_ids.tolist() == theirs["input_ids"][0].tolist()
    ready = Ready(encoded=encoded, patches=(patcher.cut(pixels),), source=0)
    batch = collate([[ready]], patcher=patcher, info=info, num_sources=1)
    assert torch.equal(batch.pixel_values_PD.flatten(), theirs["pixel_values"].flatten())
    said = processor.tokenizer.decode(encoded.labels[encoded.labels != -100].tolist())
    assert [part.strip() for part in said.split("<|im_end|>")] == ["42", "Yes, 42", ""]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"family": "internvl", "tile_px": 40}, "tile_px is 40.*multiple of 16.*tile_px: 48"),
        ({"family": "llava_onevision", "tile_px": 20}, "tile_px is 20.*multiple of 8.*tile_px: 24"),
        ({"family": "llava_onevision", "min_area_px": 64}, "sets min_area_px or max_area_px"),
    ],
)
def test_settings_that_make_no_tiles_are_refused(params, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        fitted(tmp_path, **params)


@pytest.mark.parametrize(
    ("family", "name", "value", "message"),
    [
        ("internvl", "image_seq_length", 15, "tiles of 64 px would have 60 patches"),
        ("internvl", "image_seq_length", 4096, "tiles of 64 px would have 16384 patches"),
        ("internvl", "image_seq_length", 0, "would have 0 patches"),
        ("llava_onevision", "num_image_tokens", 65, "tiles of 64 px would have 65 patches"),
        ("llava_onevision", "vision_aspect_ratio", "square", "vision_aspect_ratio is 'square'"),
    ],
)
def test_a_processor_that_contradicts_itself_is_refused(family, name, value, message, tmp_path):
    folder = fitted(tmp_path, family=family)
    path = folder / "processor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    params = ProcessorParams(mode="load", source=str(folder))
    with pytest.raises(ConfigError, match=message):
        fit(make_index(tmp_path), params, str(tmp_path / "processor"))


def test_resolutions_of_parts_of_tiles_are_refused(tmp_path):
    folder = fitted(tmp_path, family="llava_onevision")
    path = folder / "processor_config.json"
    config = json.loads(path.read_text())
    config["image_processor"]["image_grid_pinpoints"] = [[64, 64], [64, 100]]
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"image_grid_pinpoints are .*100.*multiples of 64 px"):
        fit(
            make_index(tmp_path),
            ProcessorParams(mode="load", source=str(folder)),
            str(tmp_path / "processor"),
        )


@pytest.mark.parametrize("family", ["internvl", "llava_onevision", "qwen3_vl"])
def test_a_template_that_writes_another_image_token_is_refused(family, tmp_path):
    folder = fitted(tmp_path, family=family)
    path = folder / "chat_template.jinja"
    for token in ("<IMG_CONTEXT>", "<image>", "<|image_pad|>"):
        path.write_text(path.read_text().replace(token, "<picture>"))
    with pytest.raises(ConfigError, match=r"writes 0 image tokens for an image: .*<picture>"):
        fit(
            make_index(tmp_path),
            ProcessorParams(mode="load", source=str(folder)),
            str(tmp_path / "processor"),
        )


@pytest.mark.parametrize(
    ("family", "message"),
    [("internvl", "cannot be loaded.*image_token"), ("llava_onevision", "has no token for images")],
)
def test_a_tokenizer_without_image_tokens_is_refused(family, message, tmp_path):
    folder = fitted(tmp_path, family=family)
    plain = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    vocab = {token: number for number, token in enumerate((*plain, *map(chr, range(33, 123))))}
    tokenizer_of(vocab, [], special_tokens=plain).save_pretrained(folder)
    with pytest.raises(ConfigError, match=message):
        fit(
            make_index(tmp_path),
            ProcessorParams(mode="load", source=str(folder)),
            str(tmp_path / "processor"),
        )
