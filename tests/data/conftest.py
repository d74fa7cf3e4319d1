"""A small dataset in LLaVA's form, built row by row, and images in every format that is read."""

from __future__ import annotations

import http.client
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image
from tenacity import wait_none

from diptych.core.records import RawSamples
from diptych.data.sources import SourceParams, gather

from .servers import Proxy, s3_server


def pixels(width_px: int, height_px: int, *, seed: int = 0) -> np.ndarray:
    """Smooth colours that differ in every corner, so that a wrong rotation shows."""
    x = np.linspace(0, 200, width_px)[None, :, None]
    y = np.linspace(0, 100, height_px)[:, None, None]
    tint = np.random.default_rng(seed).uniform(0, 50, size=3)
    return np.broadcast_to(
        x * [1, 0, 0.5] + y * [0, 1, 0.5] + tint, (height_px, width_px, 3)
    ).astype(np.uint8)


def encoded(image: Image.Image, *, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format=format, **options)
    return file.getvalue()


class Dataset:
    """Annotations in the making, beside a folder of images."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[Any] = []
        (folder / "images").mkdir(parents=True)

    def image(self, name: str, *, width_px: int = 20, height_px: int = 16, seed: int = 0) -> str:
        suffix = "JPEG" if name.endswith(".jpg") else "PNG"
        picture = Image.fromarray(pixels(width_px, height_px, seed=seed))
        return self.file(name, data=encoded(picture, format=suffix))

    def file(self, name: str, *, data: bytes) -> str:
        path = self.folder / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return name

    def add(
        self,
        sample_id: Any,
        *images: str,
        question: str = "What is it?",
        answer: str = "a thing",
        **fields: Any,
    ) -> None:
        row = {"id": sample_id} if sample_id is not None else {}
        if images:
            row["image"] = images[0] if len(images) == 1 else list(images)
        row["conversations"] = [
            {"from": "human", "value": "<image>\n" * len(images) + question},
            {"from": "gpt", "value": answer},
        ]
        self.rows.append(row | fields)

    def fill(self, count: int) -> None:
        """Add good samples, each with an image of its own."""
        for number in range(count):
            name = self.image(
                f"good-{number}.{'jpg' if number % 2 else 'png'}",
                width_px=10 + number % 7,
                height_px=10 + number % 5,
                seed=number,
            )
            self.add(f"good-{number}", name, answer=str(number))

    def write(self, name: str = "rows.json", *, source: str = "toy", **params: Any) -> RawSamples:
        path = self.folder / name
        if name.endswith(".jsonl"):
            path.write_text(
                "".join(
                    (row if isinstance(row, str) else json.dumps(row)) + "\n" for row in self.rows
                )
            )
        else:
            path.write_text(json.dumps(self.rows))
        images = str(self.folder / "images")
        return gather({source: SourceParams(kind="llava", path=str(path), images=images, **params)})


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return Dataset(tmp_path / "raw")


@pytest.fixture(scope="session")
def s3_process() -> Iterator[Proxy]:
    with s3_server() as proxy:
        yield proxy


@pytest.fixture
def s3(s3_process: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """An S3 server that the environment leads to; waiting between attempts takes no time."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "hidden-key")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_process.url)
    monkeypatch.setattr("diptych.data.files.remote._WAIT", wait_none())
    s3_process.plan()
    return s3_process


def put(s3: Proxy, files: dict[str, bytes], *, bucket: str) -> None:
    """Put files into a bucket, where everybody may read them."""
    headers = {"Authorization": "AWS hidden-key:signature", "x-amz-acl": "public-read"}
    for path, data in {"": b"", **files}.items():
        connection = http.client.HTTPConnection(*s3.server_address[:2], timeout=20)
        connection.request("PUT", f"/{bucket}/{quote(path)}", body=data, headers=headers)
        assert connection.getresponse().status == 200
        connection.close()
