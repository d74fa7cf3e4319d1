"""In: a sample's messages and image sizes. Out: its row, token by token, as a person reads it.

The row is the one that training reads, made by `data/encode.py`; here only the text that each token
stands for is put beside its label. Tokens of an image that stand together are one piece; what the
family writes around and between them is its frame.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from diptych.core.axes import IGNORED_LABEL
from diptych.core.records import Message, ProcessorInfo, TileSettings
from diptych.data.chat import ChatTokenizer, to_chat
from diptych.data.encode import Encoded, Rendered, encode, frame_images
from diptych.shape.picture import Picture


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a row.

    Attributes:
        text: what the tokens stand for; of an image, its patches or tiles, and its tokens.
        kind: `given` tokens are read, `label` tokens are learnt, `image` stands for an image's, and
            `frame` for those around them, which are read like given ones.
        num_tokens: 1, unless the piece is an image or several tokens make one character.
    """

    text: str
    kind: str
    num_tokens: int = 1


def split_row(
    messages: Sequence[Message],
    *,
    images_wh: Sequence[tuple[int, int]],
    tokenizer: ChatTokenizer,
    info: ProcessorInfo,
) -> tuple[Encoded, list[Piece]]:
    """Encode a conversation as training does, and cut its row into pieces.

    Args:
        messages: the turns; `<image>` in a text stands for the next image.
        images_wh: (width, height) in px of every image, in order.
        tokenizer: the processor's chat template and tokenizer.
        info: the processor's token ids and image settings.

    Returns:
        The row, and its pieces in order; their tokens are all of the row's.

    Raises:
        DataError: the conversation cannot be encoded.
    """
    encoded = encode(messages, images_wh=images_wh, tokenizer=tokenizer, info=info)
    framed = _frame(tokenizer.render(to_chat(messages)), pictures=encoded.pictures, info=info)
    ids, offsets = tokenizer.tokenize(framed.text)
    images = iter(_image_pieces(encoded.pictures, info=info))
    pieces: list[Piece] = []
    at = through = 0
    for token, (start, end) in zip(ids, offsets, strict=True):
        assert encoded.input_ids[at] == token, "the row is not the rendered conversation's"
        # Several tokens of one character share its offsets: the first of them shows it.
        shown, through = framed.text[through:end], max(through, end)
        if token == info.tokens.image:
            piece = next(images)
        else:
            is_label = encoded.labels[at] != IGNORED_LABEL
            piece = Piece(shown, "label" if is_label else _given((start, end), frames=framed.spans))
        at += piece.num_tokens
        _add(pieces, piece=piece)
    assert at == len(encoded.input_ids), "the pieces are not the whole row"
    return encoded, pieces


def _given(chars: tuple[int, int], *, frames: Sequence[tuple[int, int]]) -> str:
    """Say whether a token, by its characters, is of an image's frame or given otherwise."""
    start, end = chars
    return "frame" if any(first <= start < end <= last for first, last in frames) else "given"


def _frame(text: str, *, pictures: Sequence[Picture], info: ProcessorInfo) -> Rendered:
    """Put each image's own text into a conversation; the spans are where those stand."""
    if not isinstance(info.image, TileSettings):
        return Rendered(text, spans=[])
    spans = [found.span() for found in re.finditer(re.escape(info.image.placeholder), text)]
    return frame_images(Rendered(text, spans=spans), pictures=pictures, info=info)


def _image_pieces(pictures: Sequence[Picture], *, info: ProcessorInfo) -> Iterator[Piece]:
    """Yield a piece for each time that tokens of an image stand together."""
    for picture in pictures:
        for number, num_tokens in enumerate(picture.runs, start=1):
            text = f"tile {number} of {picture.num_rows}"
            if len(picture.runs) == 1:
                text = _describe(picture, is_cut=isinstance(info.image, TileSettings))
            unit = "token" if num_tokens == 1 else "tokens"
            yield Piece(f"{text}, {num_tokens} {unit}", "image", num_tokens)


def _describe(picture: Picture, *, is_cut: bool) -> str:
    if is_cut:
        return f"image {picture.num_rows} tile" + ("s" if picture.num_rows > 1 else "")
    rows, columns = picture.grid
    return f"image {columns}x{rows} patches"


def _add(pieces: list[Piece], *, piece: Piece) -> None:
    """Add a piece; one without text of its own joins the one before."""
    if pieces and not piece.text and pieces[-1].kind == piece.kind:
        last = pieces[-1]
        piece = Piece(last.text, last.kind, last.num_tokens + piece.num_tokens)
        pieces.pop()
    pieces.append(piece)
