"""In: a sample's messages and image sizes. Out: its row, token by token, as a person reads it.

The row is the one that training reads, made by `data/encode.py`; here only the text that each token
stands for is put beside its label. An image's tokens are one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        text: what the tokens stand for; of an image, its patches and tokens.
        kind: `given` tokens are read, `label` tokens are learnt, `image` stands for an image's.
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
    framed = frame_images(
        Rendered(tokenizer.render(to_chat(messages)), spans=[]),
        pictures=encoded.pictures,
        info=info,
    )
    text = framed.text
    ids, offsets = tokenizer.tokenize(text)
    runs = [(picture, run) for picture in encoded.pictures for run in picture.runs]
    images = iter(runs)
    pieces: list[Piece] = []
    at = through = 0
    for token, (_, end) in zip(ids, offsets, strict=True):
        assert encoded.input_ids[at] == token, "the row is not the rendered conversation's"
        # Several tokens of one character share its offsets: the first of them shows it.
        shown, through = text[through:end], max(through, end)
        if token == info.tokens.image:
            piece = _image_piece(*next(images), info=info)
        else:
            is_label = encoded.labels[at] != IGNORED_LABEL
            piece = Piece(shown, "label" if is_label else "given")
        at += piece.num_tokens
        _add(pieces, piece=piece)
    assert at == len(encoded.input_ids), "the pieces are not the whole row"
    return encoded, pieces


def _image_piece(picture: Picture, num_tokens: int, *, info: ProcessorInfo) -> Piece:
    rows, columns = picture.grid
    parts = f"{columns}x{rows} patches"
    if isinstance(info.image, TileSettings):
        parts = f"{picture.num_rows} tile" + ("s" if picture.num_rows > 1 else "")
    unit = "token" if num_tokens == 1 else "tokens"
    return Piece(f"image {parts}, {num_tokens} {unit}", "image", num_tokens)


def _add(pieces: list[Piece], *, piece: Piece) -> None:
    """Add a piece; one without text of its own joins the one before."""
    if pieces and not piece.text and pieces[-1].kind == piece.kind:
        last = pieces[-1]
        piece = Piece(last.text, last.kind, last.num_tokens + piece.num_tokens)
        pieces.pop()
    pieces.append(piece)
