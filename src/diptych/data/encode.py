"""One conversation as token ids and labels.

Messages and the sizes of their images flow in, with a processor's tokenizer and settings; ids with
the image placeholders expanded, and labels on the assistant's answers, flow out. Pixels, batches
and torch are unknown here. The ids equal those that transformers' processor makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from diptych.core.axes import IGNORED_LABEL
from diptych.core.errors import DataError, FormatError
from diptych.core.records import IMAGE_PLACEHOLDER, Message, ProcessorInfo, TileSettings
from diptych.data.chat import ChatTokenizer, to_chat
from diptych.shape.families import family
from diptych.shape.picture import Picture


@dataclass(frozen=True, slots=True)
class Encoded:
    """One row before padding.

    Attributes:
        input_ids: [S] int64, each image's placeholder as often as it has tokens.
        labels: [S] int64, aligned with `input_ids` (not shifted), -100 where nothing is learnt.
        pictures: what each image became.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    pictures: tuple[Picture, ...]

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Return each image's `Picture.grid`."""
        return tuple(picture.grid for picture in self.pictures)

    @property
    def num_image_tokens(self) -> int:
        """Count the tokens of all images together."""
        return sum(picture.num_tokens for picture in self.pictures)

    @property
    def num_patches(self) -> int:
        """Count the patches of all images."""
        return sum(picture.num_patches for picture in self.pictures)

    @property
    def num_label_tokens(self) -> int:
        """Count the labels that a shifted loss uses: nothing predicts the first token."""
        return int(np.count_nonzero(self.labels[1:] != IGNORED_LABEL))


def encode(
    messages: Sequence[Message],
    *,
    images_wh: Sequence[tuple[int, int]],
    tokenizer: ChatTokenizer,
    info: ProcessorInfo,
    before_turn: int | None = None,
) -> Encoded:
    """Encode a conversation, or the prompt of one of its answers.

    Args:
        messages: the turns; `<image>` in a text stands for the next image.
        images_wh: (width, height) in px of every image of the conversation, in order.
        tokenizer: the processor's chat template and tokenizer.
        info: the processor's token ids and image settings.
        before_turn: index among the assistant's turns; the row then ends where that answer begins
            and has no labels. None: the whole conversation, with labels on each answer and on the
            token that ends its turn.

    Raises:
        DataError: placeholders and images differ in number, or a text holds a special token of
            images.
        FormatError: the chat template rewrites earlier turns, so that answers cannot be located.
    """
    num_placeholders = sum(message.text.count(IMAGE_PLACEHOLDER) for message in messages)
    if num_placeholders != len(images_wh):
        raise DataError(
            f"{num_placeholders} times '{IMAGE_PLACEHOLDER}' in the messages, "
            f"but {len(images_wh)} images",
            allowed="Each image has one placeholder",
        )
    chat = to_chat(messages)
    answers = [index for index, turn in enumerate(chat) if turn["role"] == "assistant"]
    if before_turn is None:
        text, spans = _locate_answers(chat, answers=answers, tokenizer=tokenizer)
    else:
        cut = answers[before_turn]
        text, spans = tokenizer.render(chat[:cut], answer_next=True), []
        seen = sum(message.text.count(IMAGE_PLACEHOLDER) for message in messages[:cut])
        images_wh = images_wh[:seen]
    return _expand(
        Rendered(text, spans=spans),
        pictures=_pictures(images_wh, info=info),
        tokenizer=tokenizer,
        info=info,
    )


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text, and the characters [start, end) of each answer and its turn's end."""

    text: str
    spans: list[tuple[int, int]]


def frame_images(
    rendered: Rendered, *, pictures: Sequence[Picture], info: ProcessorInfo
) -> Rendered:
    """Put each image's own text where its placeholder stands, and move the spans along.

    Raises:
        DataError: placeholders and images differ in number.
    """
    image = info.image
    if not isinstance(image, TileSettings) or all(each.frame is None for each in pictures):
        return rendered
    pieces = rendered.text.split(image.placeholder)
    if len(pieces) != len(pictures) + 1:
        raise _other_number(len(pieces) - 1, num_images=len(pictures))
    frames = [picture.frame or image.placeholder for picture in pictures]
    starts = np.cumsum([len(piece) for piece in pieces[:-1]])
    starts += len(image.placeholder) * np.arange(len(frames))
    grown = np.cumsum([len(frame) - len(image.placeholder) for frame in frames])

    def moved(at: int) -> int:
        before = int(np.searchsorted(starts, at, side="left"))
        return at + (int(grown[before - 1]) if before else 0)

    text = "".join(part for pair in zip(pieces, [*frames, ""], strict=True) for part in pair)
    return Rendered(text, [(moved(start), moved(end)) for start, end in rendered.spans])


def _locate_answers(
    chat: list[dict[str, Any]], *, answers: list[int], tokenizer: ChatTokenizer
) -> tuple[str, list[tuple[int, int]]]:
    """Render a chat, and return the characters [start, end) of each answer and its turn's end."""
    text = tokenizer.render(chat)
    spans = []
    for index in answers:
        prompt = tokenizer.render(chat[:index], answer_next=True)
        answer = "".join(item.get("text", "") for item in chat[index]["content"])
        end = len(prompt) + len(answer) + len(tokenizer.end_of_turn)
        plain = prompt + answer + tokenizer.end_of_turn
        if not (tokenizer.end_of_turn and text.startswith(plain)):
            through = text if index == len(chat) - 1 else tokenizer.render(chat[: index + 1])
            if not (through.startswith(prompt) and text.startswith(through)):
                return text, _marked_answers(text, chat=chat, index=index, tokenizer=tokenizer)
            end = len(through.rstrip())
        spans.append((len(prompt), end))
    return text, spans


def _marked_answers(
    text: str, *, chat: list[dict[str, Any]], index: int, tokenizer: ChatTokenizer
) -> list[tuple[int, int]]:
    """Return where the template marks answers; what ends a turn belongs to them, marked or not.

    LLaVA-OneVision's template needs it: a space before an answer is not in its prompt.
    """
    spans = tokenizer.marked_answers(chat)
    if len(spans) != sum(turn["role"] == "assistant" for turn in chat):
        raise FormatError(
            f"The chat template in '{tokenizer.folder}' rewrites earlier turns: turn {index} "
            "reads otherwise once more turns follow",
            allowed="A longer conversation begins as the shorter one does, or the template marks "
            "each answer with {% generation %}",
            cure="Train on one answer a conversation, or load a processor with another template",
        )
    over = tokenizer.end_of_turn
    return [(start, end + len(over) * text.startswith(over, end)) for start, end in spans]


def _label(
    input_ids: np.ndarray,
    *,
    offsets: list[tuple[int, int]],
    spans: list[tuple[int, int]],
) -> np.ndarray:
    """Label the tokens that lie wholly inside a span; one that straddles its start is given."""
    labels = np.full(len(input_ids), IGNORED_LABEL, dtype=np.int64)
    if not spans:
        return labels
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    for start, end in spans:
        inside = (starts >= start) & (ends <= end) & (ends > starts)
        labels[inside] = input_ids[inside]
    return labels


def _pictures(images_wh: Sequence[tuple[int, int]], *, info: ProcessorInfo) -> tuple[Picture, ...]:
    if not images_wh:
        return ()
    arithmetic = family(info.family)
    return tuple(
        arithmetic.picture(
            width_px=width, height_px=height, image=info.image, num_images=len(images_wh)
        )
        for width, height in images_wh
    )


def _expand(
    rendered: Rendered,
    *,
    pictures: tuple[Picture, ...],
    tokenizer: ChatTokenizer,
    info: ProcessorInfo,
) -> Encoded:
    """Tokenize, label, and repeat each image's tokens as often as the image has them."""
    framed = frame_images(rendered, pictures=pictures, info=info)
    ids, offsets = tokenizer.tokenize(framed.text)
    input_ids = np.array(ids, dtype=np.int64)
    labels = _label(input_ids, offsets=offsets, spans=framed.spans)
    is_image = input_ids == info.tokens.image
    num_found = int(np.count_nonzero(is_image))
    runs = [run for picture in pictures for run in picture.runs]
    if num_found != len(runs):
        raise _other_number(num_found, num_images=len(pictures))
    if not pictures:
        return Encoded(input_ids, labels, ())
    labels[is_image] = IGNORED_LABEL
    repeats = np.ones(len(input_ids), dtype=np.int64)
    repeats[is_image] = runs
    return Encoded(np.repeat(input_ids, repeats), np.repeat(labels, repeats), pictures)


def _other_number(num_found: int, *, num_images: int) -> DataError:
    return DataError(
        f"The rendered conversation has {num_found} image tokens for {num_images} images",
        allowed="Texts hold no special token of images; '<image>' stands for an image",
        cure="Remove the special token from the text",
    )
