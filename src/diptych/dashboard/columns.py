"""Lines of JSON in, columns of numbers out: one array per field, dotted names for nested ones.

A field that a line lacks, or that is null, is NaN: it was not measured. Text is left out.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

Columns = dict[str, np.ndarray]
"""Name -> [N] float32; the names in `PRECISE` are float64. All have the same N."""

PRECISE = ("step", "time_s")
OVER = {"mean": 1, "most": 2}
"""What is kept of an `Over`, and where it stands in it."""
_OVER_LENGTH = 4
_BLOCK_BYTES = 4 * 1024 * 1024
_MOST_COLUMNS = 1024


def parse_steps(data: bytes) -> Columns:
    """Parse whole lines of `steps.jsonl`; an `Over` becomes the columns of `OVER`.

    What is no JSON object with a step is left out.
    """
    table = _read(data, needed="step")
    return {} if table is None else dict(_columns(table))


def parse_samples(data: bytes) -> Columns:
    """Parse whole lines of `samples/<node>.jsonl`; fields of devices are `devices.<index>.<field>`.

    Reasons of throttling become their number.
    """
    table = _read(data, needed="time_s")
    if table is None:
        return {}
    found = dict(_columns(table))
    if "devices" in table.column_names:
        found |= _devices(table.column("devices").combine_chunks(), num_rows=table.num_rows)
    return found


def _read(data: bytes, *, needed: str) -> pa.Table | None:
    if not data.strip():
        return None
    options = pj.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES)
    try:
        table = pj.read_json(io.BytesIO(data), read_options=options)
    except pa.ArrowInvalid:
        table = _read_each(data, needed=needed)
    if needed not in table.column_names or not _is_number(table.schema.field(needed).type):
        return None
    return table.filter(pc.is_valid(table.column(needed)))  # pyright: ignore[reportAttributeAccessIssue]


def _read_each(data: bytes, *, needed: str) -> pa.Table:
    """Read what can be read: line by line, as dictionaries that agree in their numbers."""
    rows: list[dict[str, Any]] = []
    for line in data.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get(needed), int | float):
            rows.append({name: value for name, value in row.items() if _is_plain(value)})
    names = {name for row in rows for name in row}
    return pa.table(
        {name: pa.array([row.get(name) for row in rows], pa.float64()) for name in names}
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 2**53


def _columns(table: pa.Table) -> Iterator[tuple[str, np.ndarray]]:
    num = 0
    for name in table.column_names:
        for path, values in _flat(name, table.column(name).combine_chunks()):
            if num >= _MOST_COLUMNS:
                return
            num += 1
            yield path, values.astype(np.float64 if path in PRECISE else np.float32)


def _flat(name: str, array: pa.Array) -> Iterator[tuple[str, np.ndarray]]:
    kind = array.type
    if pa.types.is_struct(kind):
        for field, child in zip(kind, array.flatten(), strict=True):
            yield from _flat(f"{name}.{field.name}", child)
    elif pa.types.is_list(kind) and _is_number(kind.value_type):
        yield from _over(name, array)
    elif _is_number(kind):
        yield name, _numbers(array)


def _over(name: str, array: pa.Array) -> Iterator[tuple[str, np.ndarray]]:
    whole = pc.fill_null(pc.equal(pc.list_value_length(array), _OVER_LENGTH), False)  # pyright: ignore[reportAttributeAccessIssue]
    rows = np.asarray(whole)
    values = np.full((len(array), _OVER_LENGTH), np.nan)
    values[rows] = _numbers(array.filter(whole).flatten()).reshape(-1, _OVER_LENGTH)
    for part, number in OVER.items():
        yield f"{name}.{part}", values[:, number]


def _devices(array: pa.Array, *, num_rows: int) -> Columns:
    if not (pa.types.is_list(array.type) and pa.types.is_struct(array.type.value_type)):
        return {}
    rows = np.asarray(pc.list_parent_indices(array))  # pyright: ignore[reportAttributeAccessIssue]
    fields = dict(
        zip([field.name for field in array.type.value_type], array.flatten().flatten(), strict=True)
    )
    if "index" not in fields:
        return {}
    numbers = _numbers(fields.pop("index"))
    found: Columns = {}
    for name, child in fields.items():
        if pa.types.is_list(child.type):
            child = pc.list_value_length(child)  # pyright: ignore[reportAttributeAccessIssue]
        if not _is_number(child.type):
            continue
        values = _numbers(child)
        for index in np.unique(numbers[np.isfinite(numbers)])[:64]:
            column = np.full(num_rows, np.nan, dtype=np.float32)
            of_device = numbers == index
            column[rows[of_device]] = values[of_device]
            found[f"devices.{int(index)}.{name}"] = column
    return found


def _is_number(kind: pa.DataType) -> bool:
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return is_number or pa.types.is_boolean(kind) or pa.types.is_null(kind)


def _numbers(array: pa.Array) -> np.ndarray:
    return array.cast(pa.float64()).to_numpy(zero_copy_only=False)
