from __future__ import annotations

import shutil

import numpy as np
import pytest

from diptych.core.errors import DataError, FormatError
from diptych.core.records import Message
from diptych.data.chat import ChatTokenizer, to_chat
from diptych.data.encode import encode
from diptych.data.processor import read_processor_info
from diptych.data.shards.reader import ShardReader


@pytest.fixture(scope="module")
def auto_processor(corpus):
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(corpus.processor, local_files_only=True)


@pytest.fixture(scope="module")
def info(corpus):
    return read_processor_info(corpus.processor)


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return ChatTokenizer(corpus.processor)


@pytest.fixture(scope="module")
def samples(corpus):
    return [
        reader.read(row)
        for split in ("train", "heldout")
        for reader in [ShardReader(corpus.shards, manifest=corpus.manifest, split=split)]
        for row in range(len(reader))
    ]


def turns(*texts, system=None):
    roles = ["user", "assistant"] * len(texts)
    messages = [Message(role=role, text=text) for role, text in zip(roles, texts, strict=False)]
    return [Message(role="system", text=system), *messages] if system else messages


def sizes(sample):
    return [(image.width_px, image.height_px) for image in sample.images]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Hello", ["Hello"]),
        ("", [""]),
        ("<image>\nWhat is it?", [None, "What is it?"]),
        ("What is it?\n<image>", ["What is it?", None]),
        ("<image>What is it?", [None, "What is it?"]),
        ("<image>\n<image>\nCompare.", [None, None, "Compare."]),
        ("First <image> and then\n\n<image>", ["First ", None, " and then\n", None]),
        ("<image>\n\nTwo breaks", [None, "\nTwo breaks"]),
        ("\nno image\n", ["\nno image\n"]),
    ],
)
def test_placeholders_become_images(text, content):
    expected = [
        {"type": "image"} if item is None else {"type": "text", "text": item} for item in content
    ]
    assert to_chat([Message(role="user", text=text)]) == [{"role": "user", "content": expected}]


def test_ids_are_those_of_transformers(samples, auto_processor, tokenizer, info):
    from PIL import Image

    from diptych.data.images.decode import decode

    seen = set()
    for stored in samples:
        sample = stored.sample
        text = auto_processor.apply_chat_template(to_chat(sample.messages), tokenize=False)
        images = [Image.fromarray(decode(data)) for data in stored.images] or None
        made = auto_processor(text=[text], images=images, return_tensors="np")
        encoded = encode(sample.messages, images_wh=sizes(sample), tokenizer=tokenizer, info=info)
        np.testing.assert_array_equal(encoded.input_ids, made["input_ids"][0])
        grids = made["image_grid_thw"][:, 1:].tolist() if images else []
        assert [list(grid) for grid in encoded.grids] == grids
        assert encoded.num_image_tokens == (made["mm_token_type_ids"][0] == 1).sum()
        assert encoded.num_patches == sum(rows * columns for rows, columns in grids)
        seen.add((len(sample.images), len(sample.messages)))
    assert {number for number, _ in seen} == {0, 1, 2}
    assert max(number for _, number in seen) > 2


def test_labels_are_what_the_template_marks(samples, auto_processor, tokenizer, info):
    for stored in samples:
        sample = stored.sample
        if sample.images:
            continue
        made = auto_processor.apply_chat_template(
            to_chat(sample.messages),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            return_tensors="np",
        )
        encoded = encode(sample.messages, images_wh=[], tokenizer=tokenizer, info=info)
        marked = np.where(made["assistant_masks"] == 1, made["input_ids"], -100)
        np.testing.assert_array_equal(encoded.labels, marked[0])
        assert encoded.num_label_tokens == made["assistant_masks"].sum()


def test_labels_are_answers_and_their_ends(samples, auto_processor, tokenizer, info):
    for stored in samples:
        sample = stored.sample
        encoded = encode(sample.messages, images_wh=sizes(sample), tokenizer=tokenizer, info=info)
        labelled = encoded.labels != -100
        np.testing.assert_array_equal(encoded.labels[labelled], encoded.input_ids[labelled])
        answers = [turn.text for turn in sample.messages if turn.role == "assistant"]
        said = auto_processor.tokenizer.decode(encoded.labels[labelled])
        assert said == "".join(f"{answer}<|im_end|>" for answer in answers)


def test_labels_by_hand(auto_processor, tokenizer, info):
    messages = turns("<image>\nWhich number is shown?", "42", "More?", "No.", system="Answer.")
    encoded = encode(messages, images_wh=[(32, 16)], tokenizer=tokenizer, info=info)
    pieces = [
        ("<|im_start|>system\nAnswer.<|im_end|>\n<|im_start|>user\n<|vision_start|>", False),
        ("<|image_pad|><|image_pad|>", False),
        ("<|vision_end|>Which number is shown?<|im_end|>\n<|im_start|>assistant\n", False),
        ("42<|im_end|>", True),
        ("\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n", False),
        ("No.<|im_end|>", True),
        ("\n", False),
    ]
    ids, labels = [], []
    for text, learnt in pieces:
        part = auto_processor.tokenizer(text)["input_ids"]
        ids += part
        labels += part if learnt else [-100] * len(part)
    assert encoded.input_ids.tolist() == ids
    assert encoded.labels.tolist() == labels
    assert (encoded.input_ids.dtype, encoded.labels.dtype) == (np.int64, np.int64)


@pytest.mark.parametrize("turn", [0, 1])
def test_a_prompt_ends_where_the_answer_begins(turn, auto_processor, tokenizer, info):
    messages = turns("<image>\nWhich?", "4", "<image>\nAnd here?", "5")
    images_wh = [(32, 16), (16, 48)]
    prompt = encode(messages, images_wh=images_wh, tokenizer=tokenizer, info=info, before_turn=turn)
    whole = encode(messages, images_wh=images_wh, tokenizer=tokenizer, info=info)
    text = auto_processor.apply_chat_template(
        to_chat(messages[: 2 * turn + 1]), tokenize=False, add_generation_prompt=True
    )
    for number_of_tokens in (2, 3)[: turn + 1]:
        text = text.replace("<|image_pad|>", "!" * number_of_tokens, 1)
    text = text.replace("!", "<|image_pad|>")
    assert prompt.input_ids.tolist() == auto_processor.tokenizer(text)["input_ids"]
    assert prompt.grids == whole.grids[: turn + 1]
    assert (prompt.labels == -100).all()
    assert prompt.num_label_tokens == 0
    # What the model is asked at scoring is what it saw in training.
    np.testing.assert_array_equal(prompt.input_ids, whole.input_ids[: len(prompt.input_ids)])


def test_placeholders_and_images_must_agree(tokenizer, info):
    with pytest.raises(DataError, match=r"1 times '<image>' in the messages, but 2 images"):
        encode(
            turns("<image>\nWhich?", "4"),
            images_wh=[(16, 16), (16, 16)],
            tokenizer=tokenizer,
            info=info,
        )


def test_a_special_token_in_a_text_is_refused(tokenizer, info):
    with pytest.raises(DataError, match=r"has 2 image tokens for 1 images"):
        encode(
            turns("<image>\nWhat does <|image_pad|> mean?", "Padding."),
            images_wh=[(16, 16)],
            tokenizer=tokenizer,
            info=info,
        )


def with_template(corpus, folder, template):
    shutil.copytree(corpus.processor, folder)
    (folder / "chat_template.jinja").write_text(template)
    return ChatTokenizer(folder)


VICUNA = (
    "{% for message in messages %}{{ message.role.upper() + ': ' }}"
    "{% for item in message.content %}{{ item.text }}{% endfor %}{{ ' ###\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)


def test_another_end_of_turn_is_learnt(corpus, tmp_path, auto_processor, info):
    tokenizer = with_template(corpus, tmp_path / "vicuna", VICUNA)
    encoded = encode(
        turns("One?", "Two.", "Three?", "Four."), images_wh=[], tokenizer=tokenizer, info=info
    )
    decode = auto_processor.tokenizer.decode
    assert decode(encoded.input_ids) == (
        "USER: One? ###\nASSISTANT: Two. ###\nUSER: Three? ###\nASSISTANT: Four. ###\n"
    )
    learnt = np.split(
        encoded.labels, np.flatnonzero(np.diff((encoded.labels != -100).astype(int))) + 1
    )
    said = [decode(part) for part in learnt if part[0] != -100]
    assert said == ["Two. ###", "Four. ###"]


def test_a_token_across_the_start_of_an_answer_is_not_learnt(auto_processor, tokenizer, info):
    # '\n' ends the prompt and '\n\n' begins the answer: the tokenizer may join them.
    encoded = encode(turns("Say it.", "\n\nyes"), images_wh=[], tokenizer=tokenizer, info=info)
    learnt = encoded.labels[encoded.labels != -100]
    assert auto_processor.tokenizer.decode(learnt).lstrip("\n") == "yes<|im_end|>"
    assert auto_processor.tokenizer.decode(encoded.input_ids).count("\n\n\nyes") == 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for message in messages %}{% if message.role == 'user' or loop.last %}"
            "{{ message.content[0].text }}|{% endif %}{% endfor %}",
            "rewrites earlier turns: turn 1",
        ),
        ("{{ strftime_now('%Y') }}", "writes today's date"),
        ("{{ raise_exception('no system turns') }}", "no system turns"),
        ("{{ messages.__class__.__mro__ }}", "refuses a conversation"),
        ("{% for %}", "cannot be read"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(corpus, tmp_path, info, template, message):
    with pytest.raises(FormatError, match=message):
        encode(
            turns("One?", "Two.", "Three?", "Four."),
            images_wh=[],
            tokenizer=with_template(corpus, tmp_path / "folder", template),
            info=info,
        )


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(FormatError, match=r"no file .*chat_template\.jinja"):
        ChatTokenizer(tmp_path)


def test_text_is_what_transformers_renders(samples, auto_processor, tokenizer):
    for stored in samples:
        chat = to_chat(stored.sample.messages)
        for until in range(1, len(chat) + 1):
            for answer_next in (False, True):
                expected = auto_processor.apply_chat_template(
                    chat[:until], tokenize=False, add_generation_prompt=answer_next
                )
                assert tokenizer.render(chat[:until], answer_next=answer_next) == expected
