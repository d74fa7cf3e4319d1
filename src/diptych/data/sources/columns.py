"""Find out which columns of a table hold what.

In: a table's column names, and what the parameters say of them. Out: their names by ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from diptych.core.errors import DataError, nearest
from diptych.data.sources.cells import image_column
from diptych.data.sources.tools import FIELDS

_OTHER_NAMES = {"caption": "text", "answer": "answers"}
_TEXTS = (("conversations",), ("messages",), ("texts",), ("question", "answer"), ("caption",))
"""What a conversation is made of: the first of these that a table has."""


class ColumnError(DataError):
    """A table lacks what is needed of it; `value` names its columns."""

    def __init__(self, found: str, *, names: Sequence[str]) -> None:
        super().__init__(found)
        self.value = ", ".join(names)


def match_columns(names: Sequence[str], *, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the columns to read, by our names.

    Args:
        names: The table's columns.
        columns: Ours to theirs, where the parameters name them.

    Raises:
        ColumnError: One that is named is not there, one occurs twice, or none holds text.
    """
    for ours, theirs in columns.items():
        if theirs not in names:
            raise ColumnError(
                f"There is no column '{theirs}' for '{ours}'. {nearest(theirs, allowed=names)}",
                names=names,
            )
    found = _needed(names, columns=columns)
    for theirs in found.values():
        if names.count(theirs) > 1:
            raise ColumnError(f"The column '{theirs}' occurs more than once", names=names)
    return found


def _needed(names: Sequence[str], *, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the columns of one kind of text, of the images, of the id, and of a chat's tools."""
    for text in _TEXTS:
        found = {ours: _theirs(ours, names=names, columns=columns) for ours in text}
        if None not in found.values():
            break
    else:
        wanted = "; ".join(" and ".join(f"'{name}'" for name in text) for text in _TEXTS)
        raise ColumnError(
            f"No column holds text. Needed is one of: {wanted}; or say in 'columns' which do",
            names=names,
        )
    if not {"conversations", "messages"}.isdisjoint(found):
        found |= {name: name for name in FIELDS if name in names}
    images = image_column(names, columns=columns)
    found |= {"image": images, "id": _theirs("id", names=names, columns=columns)}
    return {ours: theirs for ours, theirs in found.items() if theirs is not None}


def _theirs(ours: str, *, names: Sequence[str], columns: Mapping[str, str]) -> str | None:
    options = [columns[ours]] if ours in columns else [ours, _OTHER_NAMES.get(ours)]
    return next((name for name in options if name is not None and name in names), None)
