"""Addresses that run a command, chain one reader to another, or read what no source is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
from pydantic import ValidationError
from webdataset.gopen import gopen

from diptych.core.errors import DataError, DiptychError
from diptych.data.files.store import Store
from diptych.data.shards.reader import ShardReader
from diptych.data.sources import SourceParams, gather
from diptych.data.sources.rows import parse
from diptych.train.compose import TrainParams
from tests.security.canary import Canary


def commands(canary: Canary) -> list[str]:
    return [f"pipe:{canary.shell}", f" pipe:{canary.shell}", f"PIPE:{canary.shell}"]


def others(canary: Canary) -> list[str]:
    secret = canary.secret_file
    return [
        f"file://{secret}",
        f"local://{secret}",
        f"simplecache::file://{secret}",
        f"s3://bucket/a::file://{secret}",
        f"https://host.example/a::file://{secret}",
        f"zip://a::file://{secret}",
        f"reference://a::file://{secret}",
        "http://host.example/a.json",
        "ftp://host.example/a.json",
        "sftp://host.example/a.json",
        "memory://a.json",
        "gopher://host.example/a",
        "https://user:password@host.example/a.json",
        "https://host.example/a.json?token=1",
    ]


def prove(canary: Canary) -> None:
    def run() -> None:
        with gopen(f"pipe:{canary.shell}") as stream:
            stream.read()

    canary.proves(run)
    with fsspec.open(f"simplecache::file://{canary.secret_file}") as file:
        canary.shows(file.read() == canary.secret.encode())


@pytest.mark.parametrize("field", ["path", "images"])
def test_addresses_of_sources(canary: Canary, field: str) -> None:
    prove(canary)
    for address in commands(canary) + others(canary):
        params: dict[str, Any] = {"kind": "llava", "path": "a.json", field: address}
        with pytest.raises(ValidationError) as caught:
            SourceParams(**params)
        [detail] = caught.value.errors()
        # The message is what is shown; it never repeats an address, which may hold a password.
        assert address not in detail["msg"]


def test_addresses_of_shards(canary: Canary) -> None:
    prove(canary)
    for address in commands(canary) + others(canary):
        with pytest.raises(ValidationError):
            TrainParams(num_steps=1, shards_url=address)


def test_addresses_that_a_record_names(canary: Canary, corpus: Any, tmp_path: Path) -> None:
    """A `raw_samples`, a manifest or a run_spec that somebody wrote goes by no parameter."""
    prove(canary)
    for address in commands(canary) + others(canary):
        with pytest.raises(DataError):
            Store(address).read("secret.txt")
    for address in [f"pipe:{canary.shell}", f"file://{canary.secret_file.parent}"]:
        with pytest.raises(DiptychError):
            ShardReader(address, manifest=corpus.manifest, split="train").read(0)
        shard = corpus.manifest.shards[0].model_copy(update={"path": address})
        manifest = corpus.manifest.model_copy(update={"shards": (shard,)})
        with pytest.raises(DiptychError):
            ShardReader(corpus.shards, manifest=manifest, split="train").read(0)


def test_addresses_in_a_meta_file(canary: Canary, tmp_path: Path) -> None:
    prove(canary)
    for address in commands(canary) + others(canary):
        meta = tmp_path / "meta.json"
        meta.write_text(json.dumps({"a": {"root": address, "annotation": address}}))
        with pytest.raises(DataError):
            gather({"mix": SourceParams(kind="internvl", path=str(meta))})


def test_addresses_of_images_in_a_row(canary: Canary, tmp_path: Path) -> None:
    """What a row names is a path below the folder of images, however it is spelled."""
    prove(canary)
    for address in commands(canary) + others(canary):
        row = {
            "image": address,
            "conversations": [
                {"from": "human", "value": "<image>\nWhat?"},
                {"from": "gpt", "value": "That."},
            ],
        }
        try:
            [path] = parse(row).image_paths
        except DataError:
            continue
        with pytest.raises(DataError):
            Store(str(tmp_path)).read(path)
