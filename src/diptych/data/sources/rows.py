"""Understand one row: LLaVA's, ShareGPT's and OpenAI's spellings become messages and image paths.

In: a row's JSON value. Out: a `Conversation`, or `Refused` with the reason. Knows nothing of files.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal, NamedTuple

from diptych.core.records import IMAGE_PLACEHOLDER, Message
from diptych.data.reasons import Refused
from diptych.data.sources.tools import FIELDS, TURN_FIELDS, check_tools

Role = Literal["system", "user", "assistant"]

_ROLES: dict[str, Role] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}
_PART_KINDS: dict[str, Literal["text", "image"]] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "image": "image",
    "image_url": "image",
    "input_image": "image",
}
_IMAGE_FIELDS = ("image", "image_url", "path", "url")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_UNUSUAL = ("kinds", *FIELDS)
FETCHED = "https://"
"""Addresses that begin so are passed on: a source may be told to fetch them."""
BY_ADDRESS = (
    "An image is given by an address; only files below the source's folder of images are read: "
    "download them, and write their paths"
)
_MAX_SHOWN_CHARS = 200
_IDS = (str, int)


class Conversation(NamedTuple):
    """A row's content: its id (or None), turns, image paths and the kind of each answer.

    A turn is a role and a text: no object is made for each, because there is one row per sample.
    """

    id: str | None
    turns: tuple[tuple[Role, str], ...]
    image_paths: tuple[str, ...]
    kinds: tuple[str, ...]

    @property
    def messages(self) -> tuple[Message, ...]:
        """The turns as records."""
        return tuple([Message(role=role, text=text) for role, text in self.turns])


def read_id(value: Any) -> str | None:
    """Return a row's id as text, None where it has none that is text or a whole number."""
    found = value.get("id") if isinstance(value, dict) else None
    if not isinstance(found, _IDS) or isinstance(found, bool):
        return None
    text = str(found)
    return text if text and _is_text(text) else None


def parse(value: Any) -> Conversation:
    """Read a row.

    Args:
        value: `{"id", "image" or "images", "conversations" or "messages", "kinds"}`; a turn is
            `{"from", "value"}`, `{"role", "content"}` or, as in our shards, `{"role", "text"}`.
            Content is text, in which `<image>` stands
            for the next image, or a list of parts, in which nothing but an image part does.

    Raises:
        Refused: The row is no conversation that can be learnt from.
    """
    return _parse_plain(value) or _parse_any(value)


def _parse_plain(value: Any) -> Conversation | None:
    """Read the most usual row in one pass: texts of user and assistant in turns, images beside.

    Returns:
        What `_parse_any` does, in a third of the time; None where anything is less usual, be it
        right or wrong.
    """
    if type(value) is not dict or any(map(value.get, _UNUSUAL)):
        return None
    given = value.get("conversations")
    if given is None:
        given = value.get("messages")
    image_paths = _plain_paths(value.get("image"), value.get("images"))
    if image_paths is None or type(given) is not list or not given:
        return None
    turns: list[tuple[Role, str]] = []
    expected: Role = "user"
    num_placeholders = 0
    for turn in given:
        role, text = _plain_turn(turn)
        if role != expected:
            return None
        turns.append((expected, text))
        if role == "user":
            num_placeholders += text.count(IMAGE_PLACEHOLDER)
            expected = "assistant"
        elif IMAGE_PLACEHOLDER in text:
            return None
        else:
            expected = "user"
    if expected != "user" or num_placeholders != len(image_paths):
        return None
    return Conversation(read_id(value), tuple(turns), image_paths, ())


def _plain_turn(turn: Any) -> tuple[Role | None, str]:
    """Return a turn's role and text; None and nothing where either is unusual."""
    if type(turn) is not dict or not TURN_FIELDS.isdisjoint(turn):
        return None, ""
    role, text = turn.get("from"), turn.get("value")
    if role is None:
        role = turn.get("role")
    if text is None:
        text = turn.get("content")
    if type(role) is str and type(text) is str and _is_plain(text):
        return _ROLES.get(role), text
    return None, ""


def _is_plain(text: str) -> bool:
    return bool(text) and not text.isspace() and (text.isascii() or _is_text(text))


def _plain_paths(image: Any, images: Any) -> tuple[str, ...] | None:
    """Return the images that are given beside the turns; None where they are unusual."""
    found = image or images
    if not found:
        return ()
    if image and images:
        return None
    paths = [found] if type(found) is str else found
    if type(paths) is not list:
        return None
    return tuple(paths) if all(map(_is_plain_path, paths)) else None


def _is_plain_path(path: Any) -> bool:
    if type(path) is not str or not path or not path.isascii():
        return False
    return "\0" not in path and "://" not in path


def _parse_any(value: Any) -> Conversation:
    turns, image_paths = _read_turns(value)
    _check_order(turns)
    _check_placeholders(turns, num_images=len(image_paths))
    kinds = _kinds(value)
    num_answers = sum([role == "assistant" for role, _ in turns])
    if kinds and len(kinds) != num_answers:
        raise Refused(
            "kinds_mismatch",
            detail=f"`kinds` has {len(kinds)} words for {num_answers} answers",
            value=", ".join(kinds),
        )
    return Conversation(read_id(value), turns, image_paths, kinds)


def read_image_paths(value: Any) -> tuple[str, ...]:
    """Return a row's images in their order, as `parse` does, without checking the rest.

    Raises:
        Refused: The row is no conversation at all.
    """
    return _read_turns(value)[1]


def is_path(name: str) -> bool:
    """Tell whether an image's name can be a path: it is text without NUL, and no address."""
    return bool(name) and "\0" not in name and _is_text(name) and not _URL.match(name)


def show(value: object) -> str:
    """Write any value for a person, cut short; one nested too deep is only named."""
    if isinstance(value, bytes):
        return value[: 4 * _MAX_SHOWN_CHARS].decode("utf-8", errors="replace")[:_MAX_SHOWN_CHARS]
    try:
        return str(value)[:_MAX_SHOWN_CHARS]
    except (RecursionError, ValueError):  # ValueError: a whole number of thousands of digits
        return f"a {type(value).__name__} too large to show"


def _read_turns(value: Any) -> tuple[tuple[tuple[Role, str], ...], tuple[str, ...]]:
    """Return the turns and the paths of the images that they hold."""
    if not isinstance(value, dict):
        raise Refused("malformed_row", detail="The row is not a JSON object", value=show(value))
    named: list[str | None] = []
    given_turns = _turns(value)
    check_tools(value, turns=given_turns)
    turns = tuple([_read_turn(turn, named=named) for turn in given_turns])
    listed = _listed_images(value)
    given = tuple([path for path in named if path is not None])
    if given and (listed or len(given) < len(named)):
        raise Refused(
            "malformed_row",
            detail="Images are given both in the turns and beside them, so their order is unknown",
            value=show(listed or given),
        )
    return turns, given or listed


def _turns(value: dict[str, Any]) -> list[Any]:
    turns = _first(value, "conversations", "messages")
    if not isinstance(turns, list) or not turns:
        raise Refused(
            "malformed_row",
            detail="The row has no list of turns under 'conversations' or 'messages'",
            value=show(", ".join(map(show, value))),
        )
    return turns


def _read_turn(turn: Any, *, named: list[str | None]) -> tuple[Role, str]:
    """Read a turn; the images of its parts are appended to `named`, None where they lie beside."""
    if not isinstance(turn, dict):
        raise Refused("malformed_row", detail="A turn is not a JSON object", value=show(turn))
    role = _first(turn, "from", "role")
    content = _first(turn, "value", "content", "text")
    if isinstance(content, list):
        text = "".join(_part(part, named=named) for part in content)
    else:
        text = _text(content, what="A turn")
    if not isinstance(role, str) or role not in _ROLES:
        raise Refused(
            "unknown_role",
            detail=f"The role is none of {', '.join(_ROLES)}",
            value=show(role),
        )
    return _ROLES[role], text


def _part(part: Any, *, named: list[str | None]) -> str:
    """Return a content part as text, a placeholder for an image."""
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise Refused("malformed_row", detail="A content part has no type", value=show(part))
    kind = _PART_KINDS.get(part["type"])
    if kind is None:
        raise Refused(
            "malformed_row",
            detail=f"A content part is none of {', '.join(_PART_KINDS)}",
            value=show(part["type"]),
        )
    if kind == "image":
        found = _first(part, *_IMAGE_FIELDS)
        path = _first(found, "url", "path") if isinstance(found, dict) else found
        named.append(None if path is None else _path(path))
        return IMAGE_PLACEHOLDER
    text = _text(part.get("text"), what="A content part")
    if IMAGE_PLACEHOLDER in text:
        raise Refused(
            "placeholder_in_text",
            detail=f"{IMAGE_PLACEHOLDER} is typed in a text part, where it stands for no image",
            value=show(text),
        )
    return text


def _text(found: Any, *, what: str) -> str:
    if isinstance(found, float) and not math.isfinite(found):
        raise Refused("non_finite", detail=f"{what} has a number for a text", value=show(found))
    if not isinstance(found, str) or not _is_text(found):
        raise Refused("malformed_row", detail=f"{what} has no text", value=show(found))
    return found


def _first(fields: dict[str, Any], *names: str) -> Any:
    """Return the first field that is there and not null."""
    for name in names:
        if (found := fields.get(name)) is not None:
            return found
    return None


def _check_order(given: tuple[tuple[Role, str], ...]) -> None:
    roles = [role for role, _ in given]
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
    for place, (role, text) in enumerate(given):
        if not text.strip() and role != "system":
            kind = "answer" if role == "assistant" else "question"
            raise Refused(
                "empty_answer" if kind == "answer" else "empty_question",
                detail=f"The {kind} at turn {place + 1} has no text",
                value=text,
            )


def _listed_images(value: dict[str, Any]) -> tuple[str, ...]:
    fields = [value[name] for name in ("image", "images") if value.get(name)]
    if len(fields) > 1:
        raise Refused("malformed_row", detail="The row has both 'image' and 'images'")
    found = fields[0] if fields else []
    paths = [found] if isinstance(found, str) else found
    if not isinstance(paths, list):
        raise Refused("malformed_row", detail="An image is not given as a path", value=show(found))
    return tuple([_path(path) for path in paths])


def _path(path: Any) -> str:
    if not isinstance(path, str) or not path:
        raise Refused("malformed_row", detail="An image is not given as a path", value=show(path))
    if _URL.match(path) and not path.startswith(FETCHED):
        raise Refused("path_escapes", detail=BY_ADDRESS, value=show(path))
    if not is_path(path.removeprefix(FETCHED)):
        raise Refused("malformed_row", detail="An image is not given as a path", value=show(path))
    return path


def _check_placeholders(turns: tuple[tuple[Role, str], ...], *, num_images: int) -> None:
    asked = sum([text.count(IMAGE_PLACEHOLDER) for role, text in turns if role == "user"])
    stray = sum([text.count(IMAGE_PLACEHOLDER) for role, text in turns if role != "user"])
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
    kinds = value.get("kinds")
    if not kinds:
        return ()
    if not isinstance(kinds, list) or not all(
        isinstance(kind, str) and kind and _is_text(kind) for kind in kinds
    ):
        raise Refused("malformed_row", detail="`kinds` is not a list of words", value=show(kinds))
    return tuple(kinds)


def _is_text(text: str) -> bool:
    """Tell whether text can be written as UTF-8 (half of a surrogate pair cannot)."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
