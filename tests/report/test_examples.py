"""Examples are an ordinary sample of answers, with the images that belong to them."""

from __future__ import annotations

import io
import tarfile
from collections import Counter

import pyarrow as pa

from diptych.core.tables import PREDICTIONS
from diptych.report.examples import EXAMPLES, NUM_PER_OUTCOME, pick

from .conftest import KINDS, Finished


def test_images_belong_to_their_answers(finished: Finished) -> None:
    with tarfile.open(finished.shards / "heldout" / "starter-000000.tar") as tar:
        members = {member.name: (tar.extractfile(member) or io.BytesIO()).read() for member in tar}
    examples = pick(finished.predictions, finished.manifest, finished.shards)
    assert examples.schema == EXAMPLES
    for row in examples.to_pylist():
        stem = row["key"].removeprefix("starter/")
        expected = [
            data
            for name, data in sorted(members.items())
            if name.startswith(f"{stem}.") and not name.endswith(".json")
        ]
        assert row["images"] == expected
        kind = "image/png" if int(stem[-4:]) % 2 else "image/jpeg"
        assert row["image_types"] == [kind] * len(expected)


def test_choice_is_spread_and_repeatable(finished: Finished) -> None:
    rows = pick(finished.predictions, finished.manifest, finished.shards).to_pylist()
    right = [row for row in rows if row["correct"]]
    assert len(right) == NUM_PER_OUTCOME
    assert [row["correct"] for row in rows] == sorted(row["correct"] for row in rows)
    assert len({row["image_key"] for row in right}) == NUM_PER_OUTCOME, "one per image"
    assert set(Counter(row["kind"] for row in right)) == set(KINDS)
    backwards = finished.predictions.take(list(range(finished.predictions.num_rows))[::-1])
    assert pick(backwards, finished.manifest, finished.shards).to_pylist() == rows


def test_no_prediction_gives_no_example(finished: Finished) -> None:
    empty = pa.Table.from_pylist([], schema=PREDICTIONS)
    assert pick(empty, finished.manifest, finished.shards).num_rows == 0
