"""Make a conversation of what a table's row or a tar's members hold: captions, questions, turns.

In: fields by our names (`params.COLUMNS`) and the names of the images. Out: the JSON value of a
row, as `rows.parse` understands it. Knows nothing of files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from diptych.core.records import IMAGE_PLACEHOLDER
from diptych.data.reasons import Refused
from diptych.data.sources.params import DEFAULT_PROMPT
from diptych.data.sources.rows import show
from diptych.data.sources.tools import FIELDS


def make_value(
    fields: Mapping[str, Any], *, images: Sequence[str], prompt: str | None = None
) -> dict[str, Any]:
    """Make a row's value.

    Args:
        fields: `conversations` or `messages` (a list of turns, or JSON text of one), `texts` (pairs
            of user and assistant), `question` and `answer`, or `caption`: the first that is there
            counts; and `id`. Tools that are offered go along, for `rows.parse` to refuse.
        images: The images' names in their order. They come before the first question, unless it
            says by `<image>` where they go.
        prompt: What the user asks for a caption.

    Raises:
        Refused: None of these is there, or one is not what it should be.
    """
    for name, found in fields.items():
        if isinstance(found, float) and not math.isfinite(found):
            raise Refused("non_finite", detail=f"'{name}' is not a number", value=show(found))
    for name in ("conversations", "messages"):
        if fields.get(name) is not None:
            turns = _load(fields[name], name=name)
            break
    else:
        turns = _pairs(fields, num_images=len(images), prompt=prompt or DEFAULT_PROMPT)
        turns[0]["content"] = _with_images(turns[0]["content"], num_images=len(images))
    tools = {name: fields[name] for name in FIELDS if fields.get(name)}
    return {"id": fields.get("id"), "images": list(images), "messages": turns, **tools}


def _pairs(fields: Mapping[str, Any], *, num_images: int, prompt: str) -> list[dict[str, Any]]:
    """Return the turns of pairs of question and answer."""
    if fields.get("texts") is not None:
        texts = _load(fields["texts"], name="texts")
        if not texts or not all(isinstance(pair, dict) for pair in texts):
            raise Refused(
                "malformed_row",
                detail="'texts' is no list of user and assistant",
                value=show(texts),
            )
        pairs = [(pair.get("user"), pair.get("assistant")) for pair in texts]
    elif fields.get("question") is not None:
        pairs = [(fields["question"], _first_answer(fields.get("answer")))]
    elif fields.get("caption") is not None:
        if not num_images:
            raise Refused("missing_image", detail="The row has a caption, but no image")
        pairs = [(prompt, _first_answer(fields["caption"]))]
    else:
        raise Refused("malformed_row", detail="The row has neither turns, question nor caption")
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _first_answer(answer: Any) -> Any:
    """Return the answer, the first where there are several that are all right; numbers as text."""
    found = answer[0] if isinstance(answer, list) and answer else answer
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return str(found) if is_number else found


def _with_images(question: Any, *, num_images: int) -> Any:
    if not isinstance(question, str) or IMAGE_PLACEHOLDER in question:
        return question
    return (f"{IMAGE_PLACEHOLDER}\n" * num_images + question).removesuffix("\n")


def _load(found: Any, *, name: str) -> list[Any]:
    if isinstance(found, str | bytes):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError) as error:
            raise Refused(
                "malformed_json", detail=f"'{name}' is not valid JSON: {error}", value=show(found)
            ) from error
    if not isinstance(found, list):
        raise Refused("malformed_row", detail=f"'{name}' is no list of turns", value=show(found))
    return found
