"""A sample index written by hand, with the images that it names: for tests of what comes after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from diptych.core.hashing import xxh3_bytes
from diptych.core.records import RawSamples, RawSource
from diptych.core.tables import QUARANTINE, SAMPLE_INDEX


class Indexed:
    """Samples in the making; `write` leaves them as `index` would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[dict[str, Any]] = []
        self.refused: list[dict[str, Any]] = []

    def add(
        self,
        name: str,
        *images: bytes,
        source: str = "toy",
        split: str = "train",
        answer: str = "a thing",
        formats: tuple[str, ...] = (),
    ) -> None:
        """Add a sample; an image's bytes need not be one, as nothing decodes them."""
        paths = [f"{source}-{len(self.rows)}-{place}.img" for place in range(len(images))]
        for path, data in zip(paths, images, strict=True):
            self.image(path).parent.mkdir(parents=True, exist_ok=True)
            self.image(path).write_bytes(data)
        question = "<image>\n" * len(images) + "What is it?"
        messages = [{"role": "user", "text": question}, {"role": "assistant", "text": answer}]
        hashes = [xxh3_bytes(data) for data in images]
        self.rows.append(
            {
                "key": f"{source}/{name}",
                "source": source,
                "split": split,
                "messages": json.dumps(messages),
                "kinds": [],
                "image_names": paths,
                "image_files": paths,
                "image_offsets": [-1] * len(images),
                "image_lengths": [len(data) for data in images],
                "image_formats": list(formats) or ["jpeg"] * len(images),
                "widths_px": [20] * len(images),
                "heights_px": [10] * len(images),
                "image_hashes": hashes,
                "text_bytes": len(question) + len(answer.encode()),
                "content_hash": xxh3_bytes(json.dumps([messages, hashes]).encode()),
                "status": "ok",
            }
        )

    def fill(self, count: int, *, source: str = "toy", num_bytes: int = 700) -> None:
        """Add samples with an image each; every fourth is held out."""
        for number in range(count):
            data = f"{source} {number} ".encode() * (1 + num_bytes // 8)
            split = "heldout" if number % 4 == 3 else "train"
            self.add(f"id-{number}", data, source=source, split=split, answer=str(number))

    def image(self, path: str) -> Path:
        return self.folder / "images" / path

    def refuse(self, source: str, reason: str) -> None:
        self.refused.append({"key": f"{source}/bad", "source": source, "reason": reason})

    def write(self, *, part_rows: int = 10, group_rows: int = 4) -> tuple[Path, RawSamples]:
        """Write the index in parts of so many rows, in row groups of so many."""
        folder = self.folder / "sample_index"
        for path in folder.glob("*.parquet"):
            path.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist(self.rows, schema=SAMPLE_INDEX)
        for number, first in enumerate(range(0, len(self.rows), part_rows)):
            part = table.slice(first, part_rows)
            pq.write_table(part, folder / f"{number:06d}.parquet", row_group_size=group_rows)
        images = str(self.folder / "images")
        names = dict.fromkeys(row["source"] for row in self.rows)
        sources = tuple(
            RawSource(name=name, kind="llava", root=images, images=images, parts=())
            for name in names
        )
        return folder, RawSamples(sources=sources)

    @property
    def quarantine(self) -> pa.Table:
        return pa.Table.from_pylist(self.refused, schema=QUARANTINE)
