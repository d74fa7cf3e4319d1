"""Read an Energon-prepared folder, undecoded; runs in Energon's own environment.

`python _reading.py FOLDER NUM_SAMPLES NUM_WARM` prints `[samples, CPU seconds]` of what was read
after the first `NUM_WARM` samples.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_loader,
    get_train_dataset,
    stateless,
)


@edataclass
class Members(Sample):
    """A sample's members as they are."""

    jpg: bytes
    json: bytes


@stateless
def cook(sample: dict) -> Members:
    """Take the members out of Energon's dict."""
    return Members(**basic_sample_keys(sample), jpg=sample["0.jpg"], json=sample["json"])


class Undecoded(DefaultTaskEncoder):
    """Hand out single samples, undecoded."""

    decoder = None
    cookers = [Cooker(cook)]  # noqa: RUF012 - as Energon declares it


def main(folder: str, num_samples: int, num_warm: int) -> None:
    """Read and print."""
    torch.set_num_threads(1)
    dataset = get_train_dataset(
        folder,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=None,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=Undecoded(),
    )
    samples = iter(get_loader(dataset))
    for _ in range(num_warm):
        next(samples)
    began, num_bytes = time.process_time(), 0
    for _ in range(num_samples):
        sample = next(samples)
        num_bytes += len(sample.jpg) + len(sample.json)
    spent = time.process_time() - began
    assert num_bytes > 80_000 * num_samples, "whole images were read"
    print(json.dumps([num_samples, spent]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
