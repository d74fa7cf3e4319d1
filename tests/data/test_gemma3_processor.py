"""A processor as Google releases it: its tokenizer's kind, its template, its special tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from diptych.core.errors import ConfigError
from diptych.core.records import Message
from diptych.data.chat import ChatTokenizer, to_chat
from diptych.data.described import describe
from diptych.data.encode import encode
from diptych.data.processor import ProcessorParams, fit, read_processor_info

# Source: chat_template.json of google/gemma-3-4b-it.
TEMPLATE = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '

' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '

' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
"""
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
NAMED = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
TURNS = ["<start_of_turn>", "<end_of_turn>"]


def _tokenizer(named=NAMED):
    from transformers import GemmaTokenizer

    words = [*SPECIAL, *TURNS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "\n", "\n\n"]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = GemmaTokenizer(
        vocab=vocab, merges=[("\n", "\n")], extra_special_tokens=named, add_bos_token=True
    )
    tokenizer.add_special_tokens({"additional_special_tokens": TURNS})
    return tokenizer


def _processor(*, tokenizer=None, num_tokens=16, **image):
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    return Gemma3Processor(
        Gemma3ImageProcessor(size={"height": 56, "width": 56}, **image),
        tokenizer or _tokenizer(),
        image_seq_length=num_tokens,
        chat_template=TEMPLATE,
    )


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    root = tmp_path_factory.mktemp("gemma3")
    _processor().save_pretrained(root / "theirs")
    params = ProcessorParams(mode="load", source=str(root / "theirs"))
    return fit(root, params, str(root / "ours"))


def test_it_is_described_by_what_it_says(loaded):
    from transformers import AutoProcessor

    info = read_processor_info(loaded)
    vocab = AutoProcessor.from_pretrained(loaded).tokenizer.get_vocab()
    assert info.family == "gemma3"
    assert (info.image.side_px, info.image.patch_px, info.image.tile_tokens) == (56, 14, 16)
    assert info.image.before == "\n\n<start_of_image>"
    assert info.image.after == "<end_of_image>\n\n"
    assert info.tokens.image == vocab["<image_soft_token>"]
    assert info.tokens.vision_start == vocab["<start_of_image>"]
    assert info.tokens.vision_end == vocab["<end_of_image>"]
    # A turn ends with its own token, and so does an answer.
    assert info.tokens.eos == vocab["<end_of_turn>"]
    assert info.tokens.pad == vocab["<pad>"] == 0


def test_ids_are_its_own_and_labels_end_with_the_turn(loaded):
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(loaded)
    messages = (
        Message(role="system", text="Be short."),
        Message(role="user", text="<image>\nWhich? <image>\n"),
        Message(role="assistant", text=" The first. "),
        Message(role="user", text="Sure?"),
        Message(role="assistant", text="Yes."),
    )
    theirs = processor.apply_chat_template(
        to_chat(messages),
        tokenize=True,
        return_dict=True,
        return_tensors="np",
        processor_kwargs={"images": [Image.new("RGB", (30, 20)), Image.new("RGB", (9, 99))]},
    )
    info = read_processor_info(loaded)
    encoded = encode(
        messages,
        images_wh=[(30, 20), (9, 99)],
        tokenizer=ChatTokenizer(loaded),
        info=info,
    )
    assert encoded.input_ids.tolist() == theirs["input_ids"][0].tolist()
    begin = processor.tokenizer.bos_token_id
    assert np.count_nonzero(encoded.input_ids == begin) == 1
    assert encoded.input_ids[0] == begin
    labelled = processor.tokenizer.decode(encoded.labels[encoded.labels != -100].tolist())
    assert labelled == "The first.<end_of_turn>Yes.<end_of_turn>"


def test_pan_and_scan_is_refused():
    with pytest.raises(ConfigError, match="do_pan_and_scan on"):
        describe(_processor(do_pan_and_scan=True), source="here")


@pytest.mark.parametrize("num_tokens", [15, 9])
def test_tokens_that_the_patches_do_not_make_are_refused(num_tokens):
    with pytest.raises(ConfigError, match="An image of"):
        describe(_processor(num_tokens=num_tokens), source="here")


def test_a_tokenizer_without_the_image_token_is_refused(tmp_path):
    _processor().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    assert config.pop("image_token") == "<image_soft_token>"
    path.write_text(json.dumps(config))
    params = ProcessorParams(mode="load", source=str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot be loaded.*image_token"):
        fit(tmp_path, params, str(tmp_path / "ours"))


@pytest.mark.parametrize("change", [{"tile_px": 60}, {"patch_px": 12}, {"merge": 3}, {"merge": 16}])
def test_a_tile_that_tokens_do_not_fill_is_refused(change, corpus, tmp_path):
    params = ProcessorParams(family="gemma3", **{"tile_px": 64, "patch_px": 8, **change})
    with pytest.raises(ConfigError, match="do not fill a tile"):
        fit(corpus.sample_index, params, str(tmp_path / "processor"))
