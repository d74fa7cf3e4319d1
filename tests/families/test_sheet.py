"""The sample sheet shows every family's row: frames and tiles of images, and what is learnt.

Expected tokens are those of transformers' own processor, expected labels those that the template
marks for it.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from diptych.core.records import Message
from diptych.data.chat import ChatTokenizer, to_chat
from diptych.report.tokens import split_row

MESSAGES = (
    Message(role="system", text="Be brief."),
    Message(role="user", text="<image>\nRead it."),
    Message(role="assistant", text="42"),
    Message(role="user", text="And again?"),
    Message(role="assistant", text="7"),
)
SIZE = (96, 60)

FRAMES = {
    "smolvlm": [
        *("<fake_token_around_image>", "<row_1_col_1>", "<fake_token_around_image>"),
        *("<row_1_col_2>", "<fake_token_around_image>", "<row_1_col_3>"),
        *("\n", "<fake_token_around_image>", "<row_2_col_1>", "<fake_token_around_image>"),
        *("<row_2_col_2>", "<fake_token_around_image>", "<row_2_col_3>"),
        *("\n", "\n", "<fake_token_around_image>", "<global-img>", "<fake_token_around_image>"),
    ],
    "internvl": ["<img>", "</img>"],
    "gemma3": ["\n\n", "<start_of_image>", "<end_of_image>", "\n\n"],
}
"""What stands around and between an image's tokens, as the families' papers and cards show it."""


def test_the_sheet_shows_the_row_of_the_processor(prepared):
    tokenizer, info = ChatTokenizer(prepared.corpus.processor), prepared.info
    _, pieces = split_row(MESSAGES, images_wh=[SIZE], tokenizer=tokenizer, info=info)
    theirs = prepared.processor.apply_chat_template(
        to_chat(MESSAGES),
        tokenize=True,
        return_dict=True,
        processor_kwargs={"images": [Image.new("RGB", SIZE)]},
    )["input_ids"]
    ids = np.ravel(theirs).tolist()
    kinds = [piece.kind for piece in pieces for _ in range(piece.num_tokens)]
    assert [kind == "image" for kind in kinds] == [token == info.tokens.image for token in ids]
    shown = {kind: [each.text for each in pieces if each.kind == kind] for kind in set(kinds)}
    assert "Be brief." in "".join(shown["given"])
    assert "Read it." in "".join(shown["given"])
    learnt = "".join(shown["label"])
    over = tokenizer.end_of_turn
    assert learnt.replace("\n", "").replace(" ", "") == f"42{over}7{over}"
    assert "".join(shown.get("frame", [])) == "".join(FRAMES.get(prepared.case.model.family, []))


def test_every_tile_that_stands_alone_is_numbered(prepared):
    tokenizer, info = ChatTokenizer(prepared.corpus.processor), prepared.info
    row, pieces = split_row(MESSAGES, images_wh=[SIZE], tokenizer=tokenizer, info=info)
    images = [piece.text for piece in pieces if piece.kind == "image"]
    if prepared.case.model.family == "smolvlm":
        # Three columns and two rows of 32 px tiles, and the whole: 4 x 4 patches, 2 x 2 a token.
        assert images == [f"tile {number} of 7, 4 tokens" for number in range(1, 8)]
    else:
        assert len(images) == 1
        assert f"{row.num_image_tokens} tokens" in images[0]
