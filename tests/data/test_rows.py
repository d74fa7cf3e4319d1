"""What is in a row: LLaVA's and ShareGPT's spellings, and every way to be refused."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.data.reasons import Refused
from diptych.data.rows import parse, read_id

ASK = {"from": "human", "value": "<image>\nWhat?"}
SAY = {"from": "gpt", "value": "This."}
TEXT = {"from": "human", "value": "What?"}


def _row(*turns: Any, **fields: Any) -> dict[str, Any]:
    return {"id": "a", "conversations": list(turns)} | fields


def test_llava_with_several_turns_and_images() -> None:
    found = parse(
        _row(
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "<image>\n<image>\nSame?"},
            {"from": "gpt", "value": "No."},
            {"from": "human", "value": "Why?"},
            {"from": "gpt", "value": "Colour."},
            image=["a.jpg", "b/c.png"],
            kinds=["compare", "why"],
        )
    )
    assert found.id == "a"
    assert [message.role for message in found.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert found.messages[1].text == "<image>\n<image>\nSame?"
    assert found.image_paths == ("a.jpg", "b/c.png")
    assert found.kinds == ("compare", "why")


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [ASK, SAY], "image": "a.jpg"},
        {"conversations": [ASK, SAY], "images": ["a.jpg"]},
        {"conversations": [ASK, SAY], "image": None, "images": "a.jpg"},
        {
            "messages": [
                {"role": "user", "content": "<image>\nWhat?"},
                {"role": "assistant", "content": "This."},
            ],
            "images": ["a.jpg"],
        },
        {
            "conversations": [
                {"from": "user", "value": "<image>\nWhat?"},
                {"from": "assistant", "value": "This."},
            ],
            "image": "a.jpg",
        },
    ],
)
def test_spellings_mean_the_same(row: dict[str, Any]) -> None:
    found = parse(row)
    assert found.id is None
    assert found.image_paths == ("a.jpg",)
    assert [(m.role, m.text) for m in found.messages] == [
        ("user", "<image>\nWhat?"),
        ("assistant", "This."),
    ]


@pytest.mark.parametrize("empty", [{}, {"image": None}, {"image": ""}, {"images": []}])
def test_text_only(empty: dict[str, Any]) -> None:
    assert parse(_row(TEXT, SAY, **empty)).image_paths == ()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"id": "x"}, "x"),
        ({"id": 7}, "7"),
        ({"id": 0}, "0"),
        ({"id": True}, None),
        ({"id": 1.5}, None),
        ({"id": ""}, None),
        ({"id": "\ud800"}, None),
        ({}, None),
        ([], None),
    ],
)
def test_ids(value: Any, expected: str | None) -> None:
    assert read_id(value) == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("text", "malformed_row"),
        ([1], "malformed_row"),
        (None, "malformed_row"),
        ({}, "malformed_row"),
        (_row(), "malformed_row"),
        ({"conversations": {"from": "human"}}, "malformed_row"),
        (_row("What?", "This."), "malformed_row"),
        (_row({"from": "human"}, SAY), "malformed_row"),
        (_row({"from": "human", "value": 3}, SAY), "malformed_row"),
        (_row({"from": "human", "value": "\udc00"}, SAY), "malformed_row"),
        (_row({"from": "human", "value": ["a"]}, SAY), "malformed_row"),
        (_row({"value": "What?"}, SAY), "unknown_role"),
        (_row({"from": "Human", "value": "What?"}, SAY), "unknown_role"),
        (_row({"from": ["human"], "value": "What?"}, SAY), "unknown_role"),
        (_row(TEXT), "no_answer"),
        (_row(SAY), "turn_order"),
        (_row(TEXT, TEXT, SAY), "turn_order"),
        (_row(TEXT, SAY, SAY), "turn_order"),
        (_row(TEXT, SAY, TEXT), "turn_order"),
        (_row(TEXT, {"from": "system", "value": "Stop."}, SAY), "turn_order"),
        (_row(TEXT, {"from": "gpt", "value": " \n"}), "empty_answer"),
        (_row({"from": "human", "value": ""}, SAY), "empty_question"),
        (_row(TEXT, SAY, image="a.jpg"), "placeholder_mismatch"),
        (_row(ASK, SAY), "placeholder_mismatch"),
        (_row(ASK, SAY, image=["a.jpg", "b.jpg"]), "placeholder_mismatch"),
        (_row(TEXT, {"from": "gpt", "value": "<image>"}, image="a.jpg"), "placeholder_mismatch"),
        (_row(ASK, SAY, image="a.jpg", images=["b.jpg"]), "malformed_row"),
        (_row(ASK, SAY, image={"path": "a.jpg"}), "malformed_row"),
        (_row(ASK, SAY, image=[3]), "malformed_row"),
        (_row(ASK, SAY, image="a\0.jpg"), "malformed_row"),
        (_row(TEXT, SAY, kinds=["a", "b"]), "kinds_mismatch"),
        (_row(TEXT, SAY, kinds="read"), "malformed_row"),
        (_row(TEXT, SAY, kinds=[""]), "malformed_row"),
    ],
)
def test_refused_with_a_reason(row: Any, reason: str) -> None:
    with pytest.raises(Refused) as caught:
        parse(row)
    assert caught.value.reason == reason
    assert caught.value.detail
