"""The samples that parity is measured on, and how they and the logits travel between processes.

In: the run's shards. Out: a few conversations that cover one image, several, none, and several
turns; a folder with them; arrays read back. JSON, image files and safetensors only, no pickle.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diptych.core.records import Message
from diptych.data.shards.reader import ShardReader

SAMPLES = "samples.json"
MAX_LOGITS_BYTES = 1 << 26
_MAX_SCANNED = 2_000


@dataclass(frozen=True, kw_only=True)
class ParitySample:
    """One conversation with its images' bytes."""

    key: str
    messages: tuple[Message, ...]
    images: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a model was given and what it computed for one sample.

    Attributes:
        input_ids: [S] int64, image placeholders expanded.
        pixels: [P, D] float32, every image's patches; [0, 0] without image.
        logits: [n, V] float32, at the positions that `positions` names.
    """

    input_ids: np.ndarray
    pixels: np.ndarray
    logits: np.ndarray


def choose(reader: ShardReader, *, num_samples: int) -> tuple[ParitySample, ...]:
    """Take turns among the shapes of conversation that occur, in the shards' order.

    A shape is no, one or several images, one or several answers.
    """
    rows_by_shape: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for row in range(min(reader.num_samples, _MAX_SCANNED)):
        sample = reader.read(row).sample
        num_answers = sum(message.role == "assistant" for message in sample.messages)
        rows_by_shape[min(len(sample.images), 2), num_answers > 1].append(row)
    queues = [rows_by_shape[shape] for shape in sorted(rows_by_shape)]
    longest = max((len(queue) for queue in queues), default=0)
    order = [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]
    chosen = []
    for row in sorted(order[:num_samples]):
        stored = reader.read(row)
        chosen.append(
            ParitySample(
                key=stored.sample.key,
                messages=stored.sample.messages,
                images=tuple(stored.images),
            )
        )
    return tuple(chosen)


def positions(num_tokens: int, *, num_classes: int) -> np.ndarray:
    """Pick the positions whose logits are compared: all, or evenly spread ones with the last.

    Args:
        num_tokens: S.
        num_classes: V; a long row of a large vocabulary is thinned to 64 MiB of logits.

    Returns:
        [n] int64, ascending.
    """
    most = max(1, MAX_LOGITS_BYTES // (4 * num_classes))
    if num_tokens <= most:
        return np.arange(num_tokens)
    step = num_tokens / most
    return num_tokens - 1 - (np.arange(most)[::-1] * step).astype(np.int64)


def write_samples(folder: Path, *, samples: Sequence[ParitySample]) -> None:
    """Write conversations as JSON and their images as files, byte for byte."""
    listed = []
    for number, sample in enumerate(samples):
        names = [f"{number}.{index}.image" for index in range(len(sample.images))]
        for name, image in zip(names, sample.images, strict=True):
            (folder / name).write_bytes(image)
        messages = [message.model_dump(mode="json") for message in sample.messages]
        listed.append({"key": sample.key, "messages": messages, "images": names})
    (folder / SAMPLES).write_text(json.dumps(listed, ensure_ascii=False), encoding="utf-8")


def read_samples(folder: Path) -> tuple[ParitySample, ...]:
    """Read what `write_samples` wrote."""
    listed = json.loads((folder / SAMPLES).read_text(encoding="utf-8"))
    return tuple(
        ParitySample(
            key=entry["key"],
            messages=tuple(Message.model_validate(message) for message in entry["messages"]),
            images=tuple((folder / name).read_bytes() for name in entry["images"]),
        )
        for entry in listed
    )


def write_outputs(path: Path, *, outputs: Sequence[Output]) -> None:
    """Write outputs as one safetensors file."""
    from safetensors.numpy import save_file

    arrays: dict[str, np.ndarray] = {}
    for number, output in enumerate(outputs):
        arrays[f"{number}.input_ids"] = np.ascontiguousarray(output.input_ids)
        arrays[f"{number}.pixels"] = np.ascontiguousarray(output.pixels)
        arrays[f"{number}.logits"] = np.ascontiguousarray(output.logits)
    save_file(arrays, path)


def read_outputs(path: Path) -> tuple[Output, ...]:
    """Read what `write_outputs` wrote."""
    from safetensors.numpy import load_file

    arrays: Mapping[str, np.ndarray] = load_file(path)
    return tuple(
        Output(
            input_ids=arrays[f"{number}.input_ids"],
            pixels=arrays[f"{number}.pixels"],
            logits=arrays[f"{number}.logits"],
        )
        for number in range(len(arrays) // 3)
    )
