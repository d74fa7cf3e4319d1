"""SmolVLM's processors: one as Hugging Face released it, and those that are refused."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from tokenizers import pre_tokenizers
from transformers import (
    AutoProcessor,
    Qwen2Tokenizer,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)
from transformers.models.smolvlm import processing_smolvlm

from diptych.core.errors import ConfigError
from diptych.core.records import Message
from diptych.data import described
from diptych.data.chat import ChatTokenizer, to_chat
from diptych.data.collate import Ready, collate
from diptych.data.encode import encode
from diptych.data.images.patches import load_patcher
from diptych.data.processor import ProcessorParams, fit, read_processor_info
from tests.data.test_processor import make_index

SPECIAL = ["<|im_start|>", "<fake_token_around_image>", "<image>", "<global-img>"]


def make_processor(*, image_seq_len=64, splits=True, **looks):
    """As SmolVLM2-2.2B's: its template and tokens, and `<row_1_col_1>` is no token but text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    settings = {"size": {"longest_edge": 1024}, "max_image_size": {"longest_edge": 512}} | looks
    return SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(do_image_splitting=splits, **settings),
        tokenizer=Qwen2Tokenizer(
            vocab={letter: number for number, letter in enumerate(alphabet)},
            merges=[],
            eos_token="<end_of_utterance>",
            pad_token="<|im_end|>",
            extra_special_tokens=SPECIAL,
        ),
        video_processor=SmolVLMVideoProcessor(),
        image_seq_len=image_seq_len,
        chat_template=processing_smolvlm.DEFAULT_CHAT_TEMPLATE,
    )


def _loaded(processor, folder):
    processor.save_pretrained(folder / "source")
    params = ProcessorParams(mode="load", source=str(folder / "source"))
    return fit(folder / "no_index", params, str(folder / "processor"))


@pytest.mark.parametrize("splits", [True, False])
def test_a_released_processor_gives_the_tokens_and_pixels_that_it_gives_itself(tmp_path, splits):
    folder = _loaded(make_processor(splits=splits), tmp_path)
    info, theirs = read_processor_info(folder), AutoProcessor.from_pretrained(folder)
    assert (info.family, info.image.patch_px, info.image.tile_tokens) == ("smolvlm", 16, 64)
    messages = (
        Message(role="user", text="<image>\n<image>\nWhich is larger?"),
        Message(role="assistant", text="The first."),
    )
    draw = np.random.default_rng(0)
    images = [draw.integers(0, 256, size, dtype=np.uint8) for size in ((90, 60, 3), (8, 200, 3))]
    made = theirs.apply_chat_template(
        to_chat(messages),
        tokenize=True,
        return_dict=True,
        return_tensors="np",
        processor_kwargs={"images": [Image.fromarray(image) for image in images]},
    )
    patcher = load_patcher(folder, image=info.image)
    encoded = encode(
        messages,
        images_wh=[(image.shape[1], image.shape[0]) for image in images],
        tokenizer=ChatTokenizer(folder),
        info=info,
    )
    assert encoded.input_ids.tolist() == made["input_ids"][0].tolist()
    ready = Ready(encoded=encoded, patches=tuple(map(patcher.cut, images)), source=0)
    batch = collate([[ready]], patcher=patcher, info=info, num_sources=1)
    np.testing.assert_array_equal(
        batch.pixel_values_PD.numpy().ravel(), made["pixel_values"].ravel()
    )
    said = theirs.tokenizer.decode(encoded.labels[encoded.labels != -100])
    assert said == " The first.<end_of_utterance>"


@pytest.mark.parametrize(
    ("looks", "message"),
    [
        ({"max_image_size": {"longest_edge": 500}}, "64 tokens of 500 px, and does not say how"),
        ({"patch_size": 50}, "a tile of 512 px has 10 x 10 patches of 50 px"),
        ({"image_seq_len": 63, "patch_size": 16}, "image_seq_len is 63"),
        ({"do_normalize": False}, r"zeros of the colour \[0, 0, 0\].*drops"),
        ({"image_mean": [0, 0.2, 1.0]}, r"zeros of the colour \[0, 51, 255\]"),
        ({"size": {"height": 512, "width": 512}}, "'height': 512.*longest_edge"),
    ],
)
def test_a_processor_that_cannot_be_described_is_refused(tmp_path, looks, message):
    with pytest.raises(ConfigError, match=message):
        _loaded(make_processor(**looks), tmp_path)


def test_a_tokenizer_without_image_token_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.SPECIAL", ["<|im_start|>"])
    with pytest.raises(ConfigError, match="no token for images"):
        _loaded(make_processor(), tmp_path)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"tile_px": 40}, "tile_px is 40.*16 px wide.*tile_px: 48"),
        ({"max_side_px": 385}, "max_side_px is 385, tile_px is 64.*384 px"),
        ({"vocab_size": 290}, "vocab_size is 290.*At least 298"),
    ],
)
def test_a_processor_that_cannot_be_fitted_is_refused(tmp_path, update, message):
    params = ProcessorParams(family="smolvlm", **update)
    with pytest.raises(ConfigError, match=message):
        fit(make_index(tmp_path), params, str(tmp_path / "processor"))


@pytest.fixture
def without_num2words(monkeypatch):
    monkeypatch.setattr(described, "find_spec", lambda _: None)
    monkeypatch.setattr(processing_smolvlm, "num2words", None)


def test_a_missing_package_is_named(tmp_path, without_num2words):
    params = ProcessorParams(family="smolvlm")
    with pytest.raises(ConfigError, match=r"num2words.*pip install 'diptych\[smolvlm\]'"):
        fit(make_index(tmp_path), params, str(tmp_path / "processor"))


def test_a_missing_package_is_named_when_loading(tmp_path, request):
    source = tmp_path / "source"
    make_processor().save_pretrained(source)
    request.getfixturevalue("without_num2words")
    params = ProcessorParams(mode="load", source=str(source))
    with pytest.raises(ConfigError, match=r"num2words.*pip install 'diptych\[smolvlm\]'"):
        fit(tmp_path / "no_index", params, str(tmp_path / "processor"))
