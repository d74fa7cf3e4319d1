"""Batched answers against transformers' own generation, one conversation at a time."""

import json

import numpy as np
import pytest
from PIL import Image

from diptych.core.records import Message
from diptych.data.chat import to_chat
from diptych.data.images.decode import decode
from diptych.evaluate import generate
from diptych.evaluate.generate import answer, greyed


@pytest.fixture(scope="module")
def shipped(release):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(release.folder).eval()
    return model, AutoProcessor.from_pretrained(release.folder)


@pytest.fixture(scope="module")
def prompts(reader):
    """Held-out prompts of unlike lengths: no, one and two images, first and later turns."""
    chats, images = [], []
    for row in range(reader.num_samples):
        stored = reader.read(row)
        for at, turn in enumerate(stored.sample.messages):
            if turn.role == "assistant":
                before = stored.sample.messages[:at]
                chats.append(to_chat(before))
                images.append([Image.fromarray(decode(image)) for image in stored.images])
    for question in ("How much is 3 plus 4?", "Which is larger: 12 or 9?"):
        chats.append(to_chat([Message(role="user", text=question)]))
        images.append([])
    return chats, images


def alone(model, processor, chat, images, *, max_new_tokens):
    """Answer one conversation with transformers' documented calls, without padding."""
    import torch

    arguments = {"images": images} if images else {}
    inputs = processor.apply_chat_template(
        chat,
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs=arguments,
    )
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=max_new_tokens)
    return output[0, inputs["input_ids"].shape[1] :]


def test_a_batch_answers_as_each_conversation_alone(shipped, prompts):
    model, processor = shipped
    chats, images = prompts
    assert {len(row) for row in images} == {0, 1, 2}
    expected = [
        processor.decode(
            alone(model, processor, chat, row, max_new_tokens=6), skip_special_tokens=True
        )
        for chat, row in zip(chats, images, strict=True)
    ]
    # Unlike prompts must be answered unlike, or the comparison would prove nothing.
    assert len(set(expected)) > len(expected) // 3
    found = answer(model, processor=processor, conversations=chats, images=images, max_new_tokens=6)
    assert found == expected


def test_greyed_images_keep_their_size_and_lose_everything_else():
    noise = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    (grey,) = greyed([Image.fromarray(noise)])
    assert grey.size == (40, 24)
    assert (np.asarray(grey) == 128).all()


def test_generation_stops_at_the_end_of_turn(shipped, prompts, monkeypatch):
    model, processor = shipped
    chats, images = prompts
    ids = alone(model, processor, chats[0], images[0], max_new_tokens=12)
    assert len(ids) == 12
    # Declare its third token to be the end of a turn: nothing may follow it.
    end = next(index for index in range(12) if ids[index] == ids[2])
    monkeypatch.setattr(model.generation_config, "eos_token_id", int(ids[2]))
    found = answer(
        model, processor=processor, conversations=chats[:1], images=images[:1], max_new_tokens=12
    )
    assert found == [processor.decode(ids[: end + 1], skip_special_tokens=True)]
    assert found != [processor.decode(ids, skip_special_tokens=True)]


def test_main_answers_its_part_with_and_without_images(release, corpus, reader, tmp_path):
    rows = [row for row in range(reader.num_samples) if reader.read(row).images][:2]
    asked = []
    for index, row in enumerate(rows):
        sample = reader.read(row).sample
        messages = [sample.messages[0].model_dump()]
        num_images = len(sample.images)
        asked.append({"index": index, "row": row, "num_images": num_images, "messages": messages})
    messages = [{"role": "user", "text": "How much is 3 plus 4?"}]
    asked.append({"index": 2, "row": 0, "num_images": 0, "messages": messages})
    (tmp_path / "manifest.json").write_text(corpus.manifest.model_dump_json())
    (tmp_path / "questions-1.json").write_text(json.dumps([asked[:2], asked[2:]]))
    generate.main(
        [
            *("--job", str(tmp_path), "--release", str(release.folder)),
            *("--shards", str(corpus.shards), "--part", "1"),
            *("--device", "cpu", "--max-new-tokens", "8"),
        ]
    )
    result = json.loads((tmp_path / "answers-1.json").read_text())
    assert set(result["answers"]) == {"0", "1", "2"}
    assert any(seen != blind for seen, blind in (result["answers"]["0"], result["answers"]["1"]))
    seen, blind = result["answers"]["2"]
    assert seen == blind
    assert result["generate_s"] > 0
