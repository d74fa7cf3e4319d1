"""Which samples prove a release, and how they travel."""

import numpy as np

from diptych.core.records import ImageRef, Message, Sample
from diptych.data.shards.reader import StoredSample
from diptych.export.samples import (
    MAX_LOGITS_BYTES,
    Output,
    choose,
    positions,
    read_outputs,
    read_samples,
    write_outputs,
    write_samples,
)


class Stored:
    """A reader over hand-made samples: (number of images, number of answers) each."""

    def __init__(self, *shapes):
        self.shapes = shapes
        self.num_samples = len(shapes)

    def read(self, row):
        num_images, num_answers = self.shapes[row]
        turns = [
            Message(role=role, text=f"{row} {turn}")
            for turn in range(num_answers)
            for role in ("user", "assistant")
        ]
        image = ImageRef(path="i.png", width_px=9, height_px=9, format="png")
        sample = Sample(
            key=f"s/{row}",
            source="s",
            split="heldout",
            messages=tuple(turns),
            images=(image,) * num_images,
        )
        contents = [f"{row}.{n}".encode() for n in range(num_images)]
        return StoredSample(sample=sample, images=contents, content_hash="")


def test_rare_shapes_of_conversation_are_chosen_too():
    common = [(1, 1)] * 50
    chosen = choose(Stored(*common, (0, 1), (2, 1), (1, 3)), num_samples=6)
    assert [sample.key for sample in chosen] == ["s/0", "s/1", "s/2", "s/50", "s/51", "s/52"]
    assert chosen[4].images == (b"51.0", b"51.1")
    assert len(chosen[5].messages) == 6


def test_fewer_samples_than_asked_for_are_all_chosen():
    assert len(choose(Stored((1, 1), (0, 1)), num_samples=16)) == 2


def test_positions_are_all_or_spread_with_the_last():
    assert positions(7, num_classes=512).tolist() == [0, 1, 2, 3, 4, 5, 6]
    num_classes = MAX_LOGITS_BYTES // 4 // 10  # room for ten positions
    kept = positions(95, num_classes=num_classes)
    assert len(kept) == 10
    assert kept[-1] == 94
    assert set(np.diff(kept)) <= {9, 10}
    assert positions(5, num_classes=MAX_LOGITS_BYTES).tolist() == [4]


def test_samples_travel_byte_for_byte(tmp_path):
    samples = choose(Stored((2, 1), (0, 2)), num_samples=2)
    write_samples(tmp_path, samples=samples)
    assert read_samples(tmp_path) == samples


def test_outputs_travel_exactly(tmp_path):
    generator = np.random.default_rng(0)
    outputs = [
        Output(
            input_ids=np.arange(3 + n),
            pixels=generator.random((4 * n, 6 * bool(n)), dtype=np.float32),
            logits=generator.random((3 + n, 11), dtype=np.float32).T[:7].T,
        )
        for n in range(12)
    ]
    write_outputs(tmp_path / "o.safetensors", outputs=outputs)
    for found, expected in zip(read_outputs(tmp_path / "o.safetensors"), outputs, strict=True):
        np.testing.assert_array_equal(found.input_ids, expected.input_ids)
        np.testing.assert_array_equal(found.pixels, expected.pixels)
        np.testing.assert_array_equal(found.logits, expected.logits)
