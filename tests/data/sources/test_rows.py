"""What is in a row: LLaVA's, ShareGPT's and OpenAI's spellings, and every way to be refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.data.reasons import Refused
from diptych.data.sources import rows
from diptych.data.sources.rows import Conversation, parse, read_id, read_image_paths, show

ASK = {"from": "human", "value": "<image>\nWhat?"}
SAY = {"from": "gpt", "value": "This."}
TEXT = {"from": "human", "value": "What?"}


PARTS = [{"type": "image", "image": "a.jpg"}, {"type": "text", "text": "What?"}]


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


@pytest.mark.parametrize(
    "image",
    [
        {"type": "image", "image": "b.png"},
        {"type": "image", "path": "b.png", "text": None},
        {"type": "image", "image": {"path": "b.png", "bytes": None}},
        {"type": "image_url", "image_url": {"url": "b.png", "detail": "high"}},
        {"type": "image_url", "image_url": "b.png"},
        {"type": "input_image", "image_url": "b.png"},
    ],
)
def test_content_parts_keep_the_order_of_text_and_images(image: dict[str, Any]) -> None:
    row = {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Is "},
                    {"type": "image", "image": "a.jpg"},
                    {"type": "input_text", "text": " like "},
                    image,
                    {"type": "text", "text": "?"},
                ],
            },
            {"role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]},
        ]
    }
    found = parse(row)
    assert [message.text for message in found.messages] == [
        "Be brief.",
        "Is <image> like <image>?",
        "Yes.",
    ]
    assert found.image_paths == ("a.jpg", "b.png")
    assert read_image_paths(row) == found.image_paths


def test_image_parts_without_a_path_take_the_images_beside_the_turns() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    found = parse({"messages": [{"role": "user", "content": parts}, SAY], "images": ["a.jpg"]})
    assert found.messages[0].text == "<image>What?"
    assert found.image_paths == ("a.jpg",)


def test_images_can_be_read_of_a_row_that_teaches_nothing() -> None:
    assert read_image_paths(_row(ASK, image="a.jpg")) == ("a.jpg",)


def test_any_value_can_be_shown() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert show(deep) == "a list too large to show"
    assert show(10**5000) == "a int too large to show"
    assert show("x" * 1000) == "x" * 200
    assert show(b"\xff" + b"y" * 1000).startswith("\ufffdyyy")
    while deep:  # unwound by hand: the interpreter would do it by recursion
        deep = deep[0]


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
        (_row(ASK, SAY, image="http://host/a.jpg"), "path_escapes"),
        (_row(ASK, SAY, image="file:///a.jpg"), "path_escapes"),
        (_row(ASK, SAY, image="\ud800.jpg"), "malformed_row"),
        (_row({"role": "user", "content": PARTS}, SAY, image="a.jpg"), "malformed_row"),
        (_row({"role": "user", "content": [*PARTS, {"type": "image"}]}, SAY), "malformed_row"),
        (_row({"role": "user", "content": [*PARTS, {"type": "video"}]}, SAY), "malformed_row"),
        (_row({"role": "user", "content": [*PARTS, "text"]}, SAY), "malformed_row"),
        (_row({"role": "user", "content": [{"type": "text"}]}, SAY), "malformed_row"),
        (_row({"role": "user", "content": [{"type": ["text"]}]}, SAY), "malformed_row"),
        (_row({"role": "user", "content": [{"type": "image", "image": 3}]}, SAY), "malformed_row"),
        (_row({"role": "user", "content": [{"type": "image"}]}, SAY), "placeholder_mismatch"),
        (_row({"role": "user", "content": []}, SAY), "empty_question"),
        (_row(TEXT, {"role": "assistant", "content": PARTS}), "placeholder_mismatch"),
        (
            _row({"role": "user", "content": [{"type": "text", "text": "an <image> tag"}]}, SAY),
            "placeholder_in_text",
        ),
        (
            _row(
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://h/a.jpg"}}],
                },
                SAY,
            ),
            "path_escapes",
        ),
        (_row({"from": "human", "value": float("nan")}, SAY), "non_finite"),
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


ODD = st.sampled_from([None, "", " ", 3, True, float("nan"), [], ["x"], {}, "\ud800", "a\0b"])
TEXTS = st.sampled_from(
    ["<image>", "<image>\nWhat?", "What?", "zw\u00f6lf", "<image> <image>", "\n"]
)
PATHS = st.sampled_from(["a.jpg", "b/c.png", "\u00e9.png", "http://x/a.jpg", "c:d.jpg"])
TURNS = st.one_of(
    st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt"]), "value": TEXTS}),
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXTS}),
    st.fixed_dictionaries(
        {},
        optional={
            "from": st.one_of(st.sampled_from(["human", "gpt", "system", "robot"]), ODD),
            "role": st.one_of(st.sampled_from(["user", "assistant"]), ODD),
            "value": st.one_of(TEXTS, ODD, st.just(PARTS)),
            "content": st.one_of(TEXTS, ODD, st.just(PARTS)),
        },
    ),
    ODD,
)
ASKED = st.tuples(TEXTS, st.sampled_from(["This.", "<image>", "d\u00e9j\u00e0", ""])).map(
    lambda texts: [{"from": "human", "value": texts[0]}, {"role": "assistant", "content": texts[1]}]
)
CONVERSATIONS = st.one_of(
    st.lists(ASKED, min_size=1, max_size=3).map(lambda pairs: [turn for p in pairs for turn in p]),
    st.lists(TURNS, max_size=4),
    ODD,
)
IMAGES = st.one_of(PATHS, st.lists(PATHS, max_size=3), st.lists(st.one_of(PATHS, ODD)), ODD)
ROWS = st.one_of(
    st.fixed_dictionaries({"id": st.just("a"), "conversations": CONVERSATIONS, "image": IMAGES}),
    st.fixed_dictionaries(
        {},
        optional={
            "id": st.one_of(st.text(max_size=2), st.integers(), ODD),
            "conversations": CONVERSATIONS,
            "messages": CONVERSATIONS,
            "image": IMAGES,
            "images": IMAGES,
            "kinds": st.one_of(ODD, st.lists(st.just("what"), max_size=3)),
        },
    ),
    ODD,
)


def _outcome(value: Any) -> Conversation | tuple[str, str, str]:
    try:
        return rows._parse_any(value)
    except Refused as error:
        return error.reason, error.detail, error.value


@settings(max_examples=2000, deadline=None)
@given(ROWS)
def test_the_short_way_gives_what_the_long_one_does(value: Any) -> None:
    found = rows._parse_plain(value)
    if found is not None:
        assert found == _outcome(value)


@pytest.mark.parametrize(
    "row",
    [
        _row(ASK, SAY, image="a.jpg"),
        _row(TEXT, SAY, TEXT, SAY),
        {"messages": [{"role": "user", "content": "zw\u00f6lf"}, SAY], "images": []},
    ],
)
def test_usual_rows_take_the_short_way(row: dict[str, Any]) -> None:
    assert rows._parse_plain(row) == rows._parse_any(row)


def test_what_an_address_may_hide_is_not_repeated():
    """Whoever reads a quarantine or a page sees where it leads, not with whose password."""
    refused = Refused(
        "path_escapes",
        detail="https://someone:word@host/a.jpg?token=key is no path",
        value="https://someone:word@host/a.jpg?token=key",
        image_path="s3://key:secret@bucket/b.png",
    )
    assert refused.value == "https://host/a.jpg?"
    assert refused.image_path == "s3://bucket/b.png"
    assert "word" not in str(refused)
    assert "key" not in refused.detail
    # What is no address stays as it is.
    assert Refused("empty_answer", detail="d", value="mail me@home?now").value == "mail me@home?now"
