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
from diptych.core.records import IMAGE_PLACEHOLDER, Message, ProcessorInfo
from diptych.data.chat import ChatTokenizer, to_chat
from diptych.shape.families import family


@dataclass(frozen=True, slots=True)
class Encoded:
    """One row before padding.

    Attributes:
        input_ids: [S] int64, each image's placeholder as often as it has tokens.
        labels: [S] int64, aligned with `input_ids` (not shifted), -100 where nothing is learnt.
        grids: (rows, columns) of patches of each image.
        num_image_tokens: tokens of all images together.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    grids: tuple[tuple[int, int], ...]
    num_image_tokens: int

    @property
    def num_patches(self) -> int:
        """Count the patches of all images."""
        return sum(rows * columns for rows, columns in self.grids)

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
    ids, offsets = tokenizer.tokenize(text)
    input_ids = np.array(ids, dtype=np.int64)
    labels = _label(input_ids, offsets=offsets, spans=spans)
    return _expand_images(input_ids, labels=labels, images_wh=images_wh, info=info)


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
            _check_begins(text, shorter=(prompt, through), index=index, tokenizer=tokenizer)
            end = len(through.rstrip())
        spans.append((len(prompt), end))
    return text, spans


def _check_begins(
    text: str, *, shorter: tuple[str, str], index: int, tokenizer: ChatTokenizer
) -> None:
    prompt, through = shorter
    if not (through.startswith(prompt) and text.startswith(through)):
        raise FormatError(
            f"The chat template in '{tokenizer.folder}' rewrites earlier turns: turn {index} "
            "reads otherwise once more turns follow",
            allowed="A longer conversation must begin as the shorter one does",
            cure="Train on one answer a conversation, or load a processor with another template",
        )


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


def _expand_images(
    input_ids: np.ndarray,
    *,
    labels: np.ndarray,
    images_wh: Sequence[tuple[int, int]],
    info: ProcessorInfo,
) -> Encoded:
    """Repeat each image's placeholder as often as the image has tokens."""
    is_image = input_ids == info.tokens.image
    num_found = int(np.count_nonzero(is_image))
    if num_found != len(images_wh):
        raise DataError(
            f"The rendered conversation has {num_found} image tokens for {len(images_wh)} images",
            allowed="Texts hold no special token of images; '<image>' stands for an image",
            cure="Remove the special token from the text",
        )
    if not images_wh:
        return Encoded(input_ids, labels, (), 0)
    arithmetic = family(info.family)
    grids = tuple(
        arithmetic.grid(width_px=width, height_px=height, image=info.image)
        for width, height in images_wh
    )
    num_tokens = [rows * columns // info.image.merge**2 for rows, columns in grids]
    labels[is_image] = IGNORED_LABEL
    repeats = np.ones(len(input_ids), dtype=np.int64)
    repeats[is_image] = num_tokens
    return Encoded(
        np.repeat(input_ids, repeats), np.repeat(labels, repeats), grids, sum(num_tokens)
    )
