"""Questions out of real shards, their batches, and what counts as right."""

import hashlib

import pytest

from diptych.core.records import Buckets, ImageRef, Message, Sample
from diptych.data.shards.reader import StoredSample
from diptych.evaluate.tasks import Question, batches, collect, image_key, is_correct


class Stored:
    """A reader over hand-made samples."""

    def __init__(self, *stored):
        self.stored = stored
        self.num_samples = len(stored)

    def read(self, row):
        return self.stored[row]


def sample(key, *turns, images=(), kinds=()):
    messages = tuple(Message(role=role, text=text) for role, text in turns)
    refs = tuple(
        ImageRef(path=f"{n}.png", width_px=wide, height_px=high, format="png")
        for n, (wide, high) in enumerate(images)
    )
    record = Sample(
        key=key, source="s", split="heldout", messages=messages, images=refs, kinds=kinds
    )
    contents = [f"{key}-{n}".encode() for n in range(len(images))]
    return StoredSample(sample=record, images=contents, content_hash="")


BUCKETS = Buckets(areas_px=(1_000,), aspects=(1.0,))


def test_every_assistant_turn_is_a_question_with_the_true_turns_before_it():
    stored = sample(
        "s/1",
        ("system", "Be brief."),
        ("user", "<image>\nRead it."),
        ("assistant", "12"),
        ("user", "<image> And this?"),
        ("assistant", "7"),
        images=((50, 30), (20, 40)),
        kinds=("read", "compare"),
    )
    first, second = collect(Stored(stored), buckets=BUCKETS, max_samples=None, seed=0)
    assert [turn.text for turn in first.messages] == ["Be brief.", "<image>\nRead it."]
    assert (first.text, first.answer, first.kind, first.turn) == (
        "<image>\nRead it.",
        "12",
        "read",
        0,
    )
    assert (first.num_images, first.area_px) == (1, 1_500)
    assert [turn.text for turn in second.messages[2:]] == ["12", "<image> And this?"]
    assert (second.answer, second.kind, second.turn) == ("7", "compare", 1)
    assert (second.num_images, second.area_px) == (2, 2_300)
    # Area 2,300 is in the second class, aspect 50 / 30 in the second: 1 + 1 * 2 + 1.
    assert first.bucket == second.bucket == 4
    assert first.image_key == second.image_key
    assert len(first.image_key) == 64


def test_without_kinds_and_images_a_question_has_a_kind_and_a_unit_of_its_own():
    stored = sample("s/2", ("user", "How much is 1 + 1?"), ("assistant", "2"))
    (question,) = collect(Stored(stored), buckets=BUCKETS, max_samples=None, seed=0)
    assert (question.kind, question.bucket, question.image_key) == ("other", 0, "s/2")


def test_the_unit_is_the_images_content_in_order():
    assert image_key([b"a", b"b"], key="x") == image_key([b"a", b"b"], key="y")
    assert image_key([b"a", b"b"], key="x") != image_key([b"b", b"a"], key="x")
    assert image_key([b"ab"], key="x") != image_key([b"a", b"b"], key="x")
    digest = hashlib.sha256(hashlib.sha256(b"a").digest()).hexdigest()
    assert image_key([b"a"], key="x") == digest


def test_max_samples_draws_samples_by_seed_and_keeps_their_order(corpus, reader):
    everything = collect(reader, buckets=corpus.buckets, max_samples=None, seed=0)
    assert {question.row for question in everything} == set(range(24))
    drawn = [
        [
            question.row
            for question in collect(reader, buckets=corpus.buckets, max_samples=5, seed=s)
        ]
        for s in (0, 0, 1)
    ]
    assert len(set(drawn[0])) == 5
    assert drawn[0] == sorted(drawn[0])
    assert drawn[0] == drawn[1] != drawn[2]


def test_questions_of_the_starter_name_their_kind(corpus, reader):
    questions = collect(reader, buckets=corpus.buckets, max_samples=None, seed=0)
    num_answers = sum(
        message.role == "assistant"
        for row in range(24)
        for message in reader.read(row).sample.messages
    )
    assert len(questions) == num_answers
    assert "read" in {question.kind for question in questions}


def question(area_px, text):
    return Question(
        row=0,
        key="k",
        turn=0,
        kind="read",
        bucket=0,
        messages=(Message(role="user", text=text),),
        answer="1",
        num_images=0,
        area_px=area_px,
        image_key="k",
    )


def test_batches_hold_questions_of_near_equal_length_once_each():
    questions = [
        question(0, "long " * 9),
        question(900, "a"),
        question(0, "b"),
        question(900, "c" * 5),
    ]
    assert batches(questions, size=2) == ((3, 1), (0, 2))
    assert batches(questions, size=3) == ((3, 1, 0), (2,))
    assert batches([], size=3) == ()


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("12", "12", True),
        (" The  LEFT one\n", "the left one", True),
        ("12", "1 2", False),
        ("012", "12", False),
        ("", "0", False),
        ("STRASSE", "straße", True),
    ],
)
def test_case_and_white_space_do_not_count(prediction, answer, expected):
    assert is_correct(prediction, answer=answer) is expected
