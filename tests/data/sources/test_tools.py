"""Conversations with tools are refused in every spelling and every kind of source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diptych.core.tables import read_parts
from diptych.data.indexing.index import IndexParams, index
from diptych.data.reasons import Refused
from diptych.data.sources import SourceParams, gather
from diptych.data.sources.rows import parse
from tests.data.conftest import encoded, pixels
from tests.data.sources.test_members import make_tar

ASK = {"role": "user", "content": "What is the weather?"}
SAY = {"role": "assistant", "content": "It is sunny."}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def chat(*turns: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": list(turns), **fields}


@pytest.mark.parametrize(
    ("row", "found"),
    [
        (chat(ASK, SAY, tools=[TOOL]), "'tools'"),
        (chat(ASK, SAY, tools=json.dumps([TOOL])), "'tools'"),
        (chat(ASK, SAY, functions=[TOOL["function"]]), "'functions'"),
        (chat(ASK, {**SAY, "tool_calls": [CALL]}), "'tool_calls' in a turn"),
        (
            chat(ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}),
            "'tool_calls' in a turn",
        ),
        (chat(ASK, {**SAY, "function_call": {"name": "weather"}}), "'function_call' in a turn"),
        (chat(ASK, {"role": "tool", "content": "12"}, SAY), "a turn of 'tool'"),
        (
            chat(ASK, {"role": "function", "name": "f", "content": "12"}, SAY),
            "a turn of 'function'",
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "What is the weather?"},
                    {"from": "function_call", "value": '{"name": "weather"}'},
                    {"from": "observation", "value": "sunny"},
                    {"from": "gpt", "value": "It is sunny."},
                ],
            },
            "a turn of 'function_call'",
        ),
        (
            chat(ASK, {"role": "assistant", "content": [{"type": "tool_use", "name": "weather"}]}),
            "a content part of type 'tool_use'",
        ),
    ],
)
def test_tools_are_refused_by_what_says_so(row: dict[str, Any], found: str) -> None:
    with pytest.raises(Refused) as caught:
        parse(row)
    assert (caught.value.reason, caught.value.value) == ("tools", found)
    assert found in caught.value.detail
    assert "system, user and assistant" in caught.value.detail


@pytest.mark.parametrize("none", [None, [], "", "[]", "null", {}])
def test_fields_that_hold_none_are_no_tools(none: Any) -> None:
    row = chat(ASK, {**SAY, "tool_calls": none}, tools=none, functions=none)
    assert parse(row) == parse(chat(ASK, SAY))


def _write_json(folder: Path) -> dict[str, Any]:
    rows = [{"id": "with", **chat(ASK, SAY, tools=[TOOL])}, {"id": "without", **chat(ASK, SAY)}]
    (folder / "chats.json").write_text(json.dumps(rows))
    return {"kind": "llava", "path": str(folder / "chats.json")}


def _write_lines(folder: Path) -> dict[str, Any]:
    rows = [{"id": "with", **chat(ASK, SAY, tools=[TOOL])}, {"id": "without", **chat(ASK, SAY)}]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"kind": "llava", "path": str(folder / "chats.jsonl")}


def _write_parquet(folder: Path) -> dict[str, Any]:
    tools = [json.dumps([TOOL]), "[]"]
    table = {"id": ["with", "without"], "messages": [[ASK, SAY], [ASK, SAY]], "tools": tools}
    pq.write_table(pa.table(table), folder / "chats.parquet")
    return {"kind": "parquet", "path": str(folder / "chats.parquet")}


def _write_csv(folder: Path) -> dict[str, Any]:
    turns = json.dumps([ASK, SAY]).replace('"', '""')
    rows = ["id,messages,functions", f'with,"{turns}","[1]"', f'without,"{turns}",']
    (folder / "chats.csv").write_text("\n".join(rows))
    return {"kind": "csv", "path": str(folder / "chats.csv")}


def _write_tar(folder: Path, **params: Any) -> dict[str, Any]:
    from PIL import Image

    ask = {"role": "user", "content": "<image>\nWhat is the weather?"}
    members = []
    for number, (name, row) in enumerate(
        {"with": chat(ask, SAY, tools=[TOOL]), "without": chat(ask, SAY)}.items()
    ):
        image = encoded(Image.fromarray(pixels(12 + number, 8)), format="PNG")
        members += [(f"{name}.png", image), (f"{name}.json", json.dumps(row).encode())]
    (folder / "chats.tar").write_bytes(make_tar(*members))
    return {"kind": "webdataset", "path": str(folder / "chats.tar"), **params}


def _write_mapped_tar(folder: Path) -> dict[str, Any]:
    return _write_tar(folder, columns={"messages": "json[messages]", "image": "png"})


@pytest.mark.parametrize(
    "write",
    [_write_json, _write_lines, _write_parquet, _write_csv, _write_tar, _write_mapped_tar],
)
def test_every_source_refuses_them(tmp_path: Path, write: Any) -> None:
    raw_samples = gather({"chats": SourceParams(split="train", **write(tmp_path))})
    params = IndexParams(max_quarantined_fraction=1, duplicates="keep", num_processes=1)
    sample_index, quarantine = index(raw_samples, params, str(tmp_path / "index"))
    assert [each["reason"] for each in quarantine.to_pylist()] == ["tools"]
    (kept,) = [row for part in read_parts(sample_index) for row in part.to_pylist()]
    assert "sunny" in kept["messages"]
