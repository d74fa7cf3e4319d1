"""Conversations with tools: found in every spelling, and refused before they are misread.

In: a row's JSON value, or one of its turns. Out: nothing, or `Refused` with what was found. Answers
that call tools, and what tools return, would be learnt or asked as if people had written them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from diptych.data.reasons import Refused

FIELDS = ("tools", "functions")
"""Where a row says which tools there are."""

TURN_FIELDS = frozenset({"tool_calls", "tool_call_id", "function_call"})
"""Where a turn says that it calls one, or answers a call."""

_ROLES = frozenset(
    {
        "tool",
        "tool_call",
        "tool_response",
        "function",
        "function_call",
        # ShareGPT's, and Llama's.
        "observation",
        "ipython",
    }
)
_KINDS = ("tool", "function")
"""How the types of content parts begin that call tools or answer."""

_NOTHING = frozenset({"", "[]", "{}", "null"})
"""How a table's cell may say that there are none."""


def check_tools(value: Mapping[str, Any], *, turns: list[Any]) -> None:
    """Refuse a row that offers, calls or answers tools.

    Raises:
        Refused: It does; the value is the key, role or type that says so.
    """
    found = next(_signs(value, turns=turns), None)
    if found is not None:
        raise Refused(
            "tools",
            detail=f"The conversation has {found}, and tools are not learnt. Allowed are turns of "
            "system, user and assistant with text and images: take the tools out, or leave the row "
            "out",
            value=found,
        )


def has_any(found: Any) -> bool:
    """Tell whether a field that may hold tools or calls holds any."""
    return found.strip() not in _NOTHING if isinstance(found, str) else bool(found)


def _signs(value: Mapping[str, Any], *, turns: list[Any]) -> Iterator[str]:
    for name in FIELDS:
        if has_any(value.get(name)):
            yield f"'{name}'"
    for turn in turns:
        if isinstance(turn, dict):
            yield from _signs_in(turn)


def _signs_in(turn: dict[str, Any]) -> Iterator[str]:
    for name in sorted(TURN_FIELDS & turn.keys()):
        if has_any(turn[name]):
            yield f"'{name}' in a turn"
    for role in (turn.get("from"), turn.get("role")):
        if isinstance(role, str) and role in _ROLES:
            yield f"a turn of '{role}'"
    for content in (turn.get("value"), turn.get("content")):
        yield from _kinds_in(content if isinstance(content, list) else [])


def _kinds_in(parts: list[Any]) -> Iterator[str]:
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind.startswith(_KINDS):
            yield f"a content part of type '{kind}'"
