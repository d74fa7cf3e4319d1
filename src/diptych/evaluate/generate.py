"""Answer questions with a release, in a fresh process that has nothing else of ours but the data.

In: a job folder (`manifest.json` and one `questions-<part>.json` per process) and a release folder.
Out: `answers-<part>.json` beside it. Greedy, stops at the end-of-turn token; each question is
asked twice, the second time with its images greyed out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from diptych.core.children import follow_parent
from diptych.core.files import write_text
from diptych.core.records import Manifest, Message
from diptych.core.release import ADAPTER_FOLDER
from diptych.data.chat import to_chat
from diptych.data.images.decode import decode
from diptych.data.shards.reader import ShardReader

MID_GREY = (128, 128, 128)

Conversation = list[dict[str, Any]]


def answer(
    model: Any,
    *,
    processor: Any,
    conversations: Sequence[Conversation],
    images: Sequence[Sequence[Image.Image]],
    max_new_tokens: int,
) -> list[str]:
    """Answer a batch of conversations greedily.

    Shorter prompts are padded on the left and masked, so that every answer is what the
    conversation alone would get, but for rounding.

    Args:
        model: a transformers model that generates.
        processor: its processor.
        conversations: chats that end before the turn to be answered.
        images: the images of each conversation, in reading order.
        max_new_tokens: cut an answer that does not end by itself.
    """
    arguments: dict[str, Any] = {"padding": True, "padding_side": "left"}
    if any(images):
        arguments["images"] = [list(row) for row in images]
    inputs = processor.apply_chat_template(
        list(conversations),
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs=arguments,
    ).to(model.device)
    with torch.inference_mode():
        output_BS = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    new_BS = output_BS[:, inputs["input_ids"].shape[1] :]
    return processor.batch_decode(new_BS, skip_special_tokens=True)


def greyed(images: Sequence[Image.Image]) -> list[Image.Image]:
    """Return mid-grey images of the same sizes: what is left is the question alone."""
    return [Image.new("RGB", image.size, MID_GREY) for image in images]


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer one part of a job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--release", type=Path, required=True)
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--part", type=int, required=True)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--max-new-tokens", type=int, required=True)
    options = parser.parse_args(arguments)
    follow_parent()
    _answer_part(options)


def _answer_part(options: argparse.Namespace) -> None:
    job: Path = options.job
    manifest = Manifest.model_validate_json((job / "manifest.json").read_text(encoding="utf-8"))
    reader = ShardReader(options.shards, manifest=manifest, split="heldout")
    processor = AutoProcessor.from_pretrained(
        options.release, local_files_only=True, trust_remote_code=False
    )
    model: Any = AutoModelForImageTextToText.from_pretrained(
        options.release, local_files_only=True, trust_remote_code=False
    )
    if (options.release / ADAPTER_FOLDER).is_dir():
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, options.release / ADAPTER_FOLDER)
    model = model.to(_device(options.device, part=options.part)).eval()
    asked = json.loads((job / f"questions-{options.part}.json").read_text(encoding="utf-8"))
    started = time.monotonic()
    answers: dict[str, list[str]] = {}
    for batch in asked:
        answers |= _answer_batch(
            batch,
            model=model,
            processor=processor,
            reader=reader,
            max_new_tokens=options.max_new_tokens,
        )
    result = {"answers": answers, "generate_s": time.monotonic() - started}
    write_text(job / f"answers-{options.part}.json", text=json.dumps(result, ensure_ascii=False))


def _answer_batch(
    batch: Sequence[dict[str, Any]],
    *,
    model: Any,
    processor: Any,
    reader: ShardReader,
    max_new_tokens: int,
) -> dict[str, list[str]]:
    """Answer a batch with its images and without; {question: [sighted, blind]}."""
    conversations = [
        to_chat([Message.model_validate(message) for message in question["messages"]])
        for question in batch
    ]
    images = [_images_of(question, reader=reader) for question in batch]
    seen = answer(
        model,
        processor=processor,
        conversations=conversations,
        images=images,
        max_new_tokens=max_new_tokens,
    )
    blind = list(seen)
    # Without images there is nothing to grey out: the answer is the same by definition.
    with_images = [index for index, row in enumerate(images) if row]
    if with_images:
        texts = answer(
            model,
            processor=processor,
            conversations=[conversations[index] for index in with_images],
            images=[greyed(images[index]) for index in with_images],
            max_new_tokens=max_new_tokens,
        )
        for index, text in zip(with_images, texts, strict=True):
            blind[index] = text
    return {
        str(question["index"]): [seen[place], blind[place]] for place, question in enumerate(batch)
    }


def _images_of(question: dict[str, Any], *, reader: ShardReader) -> list[Image.Image]:
    images = reader.read(question["row"]).images[: question["num_images"]]
    return [Image.fromarray(decode(image)) for image in images]


def _device(name: str, *, part: int) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        torch.set_num_threads(1)
        return torch.device("cpu")
    return torch.device("cuda", part % torch.cuda.device_count())


if __name__ == "__main__":
    main()
