"""Understand one row: LLaVA's and ShareGPT's spellings become messages and image paths.

In: a row's JSON value. Out: a `Conversation`, or `Refused` with the reason. Knows nothing of files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from diptych.core.records import IMAGE_PLACEHOLDER, Message
from diptych.data.reasons import Refused

_ROLES: dict[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A row's content: its id (or None), turns, image paths and the kind of each answer."""

    id: str | None
    messages: tuple[Message, ...]
    image_paths: tuple[str, ...]
    kinds: tuple[str, ...]


def read_id(value: Any) -> str | None:
    """Return a row's id as text, None where it has none that is text or a whole number."""
    found = value.get("id") if isinstance(value, dict) else None
    if isinstance(found, bool) or not isinstance(found, str | int):
        return None
    text = str(found)
    return text if text and _is_text(text) else None


def parse(value: Any) -> Conversation:
    """Read a row.

    Args:
        value: `{"id", "image" or "images", "conversations" or "messages", "kinds"}`; a turn is
            `{"from", "value"}` or `{"role", "content"}`.

    Raises:
        Refused: The row is no conversation that can be learnt from.
    """
    if not isinstance(value, dict):
        raise Refused("malformed_row", detail="The row is not a JSON object", value=str(value))
    messages = tuple(_message(turn) for turn in _turns(value))
    _check_order(messages)
    image_paths = _image_paths(value)
    _check_placeholders(messages, num_images=len(image_paths))
    kinds = _kinds(value)
    num_answers = sum(message.role == "assistant" for message in messages)
    if kinds and len(kinds) != num_answers:
        raise Refused(
            "kinds_mismatch",
            detail=f"`kinds` has {len(kinds)} words for {num_answers} answers",
            value=", ".join(kinds),
        )
    return Conversation(id=read_id(value), messages=messages, image_paths=image_paths, kinds=kinds)


def _turns(value: dict[str, Any]) -> list[Any]:
    turns = value.get("conversations", value.get("messages"))
    if not isinstance(turns, list) or not turns:
        raise Refused(
            "malformed_row",
            detail="The row has no list of turns under 'conversations' or 'messages'",
            value=", ".join(map(str, value)),
        )
    return turns


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise Refused("malformed_row", detail="A turn is not a JSON object", value=str(turn))
    role = turn.get("from", turn.get("role"))
    text = turn.get("value", turn.get("content"))
    if not isinstance(text, str) or not _is_text(text):
        raise Refused("malformed_row", detail="A turn has no text", value=str(turn)[:200])
    if not isinstance(role, str) or role not in _ROLES:
        raise Refused(
            "unknown_role",
            detail=f"The role is none of {', '.join(_ROLES)}",
            value=str(role),
        )
    return Message(role=_ROLES[role], text=text)


def _check_order(messages: tuple[Message, ...]) -> None:
    roles = [message.role for message in messages]
    if "assistant" not in roles:
        raise Refused("no_answer", detail="No turn is the assistant's", value=" ".join(roles))
    turns = roles[1:] if roles[0] == "system" else roles
    if len(turns) % 2 or any(
        role != ("assistant" if place % 2 else "user") for place, role in enumerate(turns)
    ):
        raise Refused(
            "turn_order",
            detail="Turns do not alternate between user and assistant, ending with the assistant",
            value=" ".join(roles),
        )
    for place, message in enumerate(messages):
        if not message.text.strip() and message.role != "system":
            kind = "answer" if message.role == "assistant" else "question"
            raise Refused(
                "empty_answer" if kind == "answer" else "empty_question",
                detail=f"The {kind} at turn {place + 1} has no text",
                value=message.text,
            )


def _image_paths(value: dict[str, Any]) -> tuple[str, ...]:
    fields = [value[name] for name in ("image", "images") if value.get(name)]
    if len(fields) > 1:
        raise Refused("malformed_row", detail="The row has both 'image' and 'images'")
    found = fields[0] if fields else []
    paths = [found] if isinstance(found, str) else found
    if not isinstance(paths, list) or not all(
        isinstance(path, str) and path and "\0" not in path and _is_text(path) for path in paths
    ):
        raise Refused(
            "malformed_row", detail="An image is not given as a path", value=str(found)[:200]
        )
    return tuple(paths)


def _check_placeholders(messages: tuple[Message, ...], *, num_images: int) -> None:
    asked = sum(m.text.count(IMAGE_PLACEHOLDER) for m in messages if m.role == "user")
    stray = sum(m.text.count(IMAGE_PLACEHOLDER) for m in messages if m.role != "user")
    if stray:
        raise Refused(
            "placeholder_mismatch",
            detail=f"{IMAGE_PLACEHOLDER} stands outside the user's turns",
            value=str(stray),
        )
    if asked != num_images:
        raise Refused(
            "placeholder_mismatch",
            detail=f"{asked} {IMAGE_PLACEHOLDER} placeholders for {num_images} images",
            value=f"{asked} != {num_images}",
        )


def _kinds(value: dict[str, Any]) -> tuple[str, ...]:
    kinds = value.get("kinds") or []
    if not isinstance(kinds, list) or not all(
        isinstance(kind, str) and kind and _is_text(kind) for kind in kinds
    ):
        raise Refused("malformed_row", detail="`kinds` is not a list of words", value=str(kinds))
    return tuple(kinds)


def _is_text(text: str) -> bool:
    """Tell whether text can be written as UTF-8 (half of a surrogate pair cannot)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
