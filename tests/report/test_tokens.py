"""The sheet shows the very row that training reads: every token once, with its own label."""

from __future__ import annotations

import pytest

from diptych.core.axes import IGNORED_LABEL
from diptych.core.errors import DataError
from diptych.core.records import Message
from diptych.data.chat import ChatTokenizer, to_chat
from diptych.data.encode import encode
from diptych.data.processor import read_processor_info
from diptych.report.tokens import split_row
from tests.conftest import Corpus

TWO_TURNS = (
    Message(role="user", text="<image>\nRead it. <b>na\u00efve</b> \u4f60\u597d"),
    Message(role="assistant", text="42 \u2014 caf\u00e9 \U0001f600"),
    Message(role="user", text="And <image> now?"),
    Message(role="assistant", text="7"),
)
SIZES = ((64, 32), (16, 16))


def test_pieces_are_the_encoded_row(corpus: Corpus) -> None:
    tokenizer, info = ChatTokenizer(corpus.processor), read_processor_info(corpus.processor)
    row, pieces = split_row(TWO_TURNS, images_wh=SIZES, tokenizer=tokenizer, info=info)
    expected = encode(TWO_TURNS, images_wh=SIZES, tokenizer=tokenizer, info=info)
    assert row.input_ids.tolist() == expected.input_ids.tolist()
    kinds = [kind for piece in pieces for kind in [piece.kind] * piece.num_tokens]
    assert len(kinds) == len(expected.input_ids)
    for kind, token, label in zip(
        kinds, expected.input_ids.tolist(), expected.labels.tolist(), strict=True
    ):
        assert (kind == "label") == (label != IGNORED_LABEL)
        assert (kind == "image") == (token == info.tokens.image)


def test_pieces_spell_the_conversation(corpus: Corpus) -> None:
    tokenizer, info = ChatTokenizer(corpus.processor), read_processor_info(corpus.processor)
    _, pieces = split_row(TWO_TURNS, images_wh=SIZES, tokenizer=tokenizer, info=info)
    text = tokenizer.render(to_chat(TWO_TURNS))
    spelled = "".join("<|image_pad|>" if p.kind == "image" else p.text for p in pieces)
    assert spelled == text
    learnt = "".join(piece.text for piece in pieces if piece.kind == "label")
    assert learnt == "42 \u2014 caf\u00e9 \U0001f600<|im_end|>7<|im_end|>"
    images = [piece for piece in pieces if piece.kind == "image"]
    # Patches of 8 px, four of them a token.
    assert images[0].text == "image 8x4 patches, 8 tokens"
    assert images[1].text == "image 2x2 patches, 1 token"


def test_what_cannot_be_encoded_is_refused(corpus: Corpus) -> None:
    tokenizer, info = ChatTokenizer(corpus.processor), read_processor_info(corpus.processor)
    with pytest.raises(DataError, match="but 0 images"):
        split_row(TWO_TURNS, images_wh=(), tokenizer=tokenizer, info=info)
