"""The page of the data: every source, real rows, refused pictures, and no text that acts."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from diptych.core.records import Manifest, RawSamples, ScheduleSpec
from diptych.core.tables import QUARANTINE
from diptych.data.bucket import BucketParams, bucket
from diptych.data.costs import load_costs, measure
from diptych.data.indexing.index import IndexParams, index
from diptych.data.processor import ProcessorParams, fit
from diptych.data.shards.shard import ShardParams, shard
from diptych.data.sources import SourceParams, gather
from diptych.report.data import show, source_rows
from diptych.report.refused import MAX_PER_REASON, show_refused
from diptych.report.samples import NUM_PER_SOURCE, choose_samples

from .conftest import MARKUP
from .test_page import Page


@dataclass(frozen=True)
class Prepared:
    """What `prepare` leaves behind, for two sources of which one has refused rows."""

    raw_samples: RawSamples
    manifest: Manifest
    shards: Path
    processor: Path
    sample_costs: Path
    quarantine: pa.Table
    pages: tuple[str, str]


def _write_source(folder: Path, *, num_rows: int, answer: str) -> None:
    """Write a LLaVA source: an image a row, some too small, one missing."""
    folder.mkdir()
    rows = []
    for number in range(num_rows):
        side = 4 if number % 5 == 4 else 24 + number
        out = io.BytesIO()
        Image.new("RGB", (side, 16), (number, 40, 200)).save(out, format="PNG")
        (folder / f"{number}.png").write_bytes(out.getvalue())
        rows.append(
            {
                "id": f"row-{number}",
                "image": "absent.png" if number == 3 else f"{number}.png",
                "conversations": [
                    {"from": "human", "value": f"<image>\\nWhat is number {number}?"},
                    {"from": "gpt", "value": answer},
                ],
            }
        )
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    root = tmp_path_factory.mktemp("looked")
    params = {}
    for name, answer in (("plain", "It is blue."), ("marked", MARKUP)):
        _write_source(root / name, num_rows=20, answer=answer)
        params[name] = SourceParams(
            kind="llava", path=str(root / name / "rows.json"), images=str(root / name)
        )
    raw_samples = gather(params)
    sample_index, quarantine = index(
        raw_samples,
        IndexParams(min_side_px=8, max_quarantined_fraction=0.9),
        str(root / "sample_index"),
    )
    shards, manifest = shard(
        sample_index, raw_samples, quarantine, ShardParams(), str(root / "shards")
    )
    processor = fit(sample_index, ProcessorParams(), str(root / "processor"))
    sample_costs = measure(manifest, shards, processor, str(root / "sample_costs"))
    *_, page, section = show(
        manifest,
        shards,
        processor,
        sample_costs,
        quarantine,
        raw_samples,
        bucket(sample_index, BucketParams()),
        ScheduleSpec(global_batch=8),
    )
    pages = (page, section)
    return Prepared(raw_samples, manifest, shards, processor, sample_costs, quarantine, pages)


def test_the_page_stands_alone(prepared: Prepared) -> None:
    page = Page(prepared.pages[0])
    for tag, attributes in page.tags:
        assert tag not in {"link", "iframe", "object", "embed", "base"}
        assert not (attributes.get("src") or "data:image/").startswith(("http", "//"))
        assert (attributes.get("href") or "#").startswith("#")
    shown = [attributes["id"] for attributes, _ in page.scripts if attributes.get("type")]
    assert shown == [
        "figure-bucket_grid",
        "figure-batch_waste",
        "figure-sample_lengths",
        "figure-image_aspects",
    ]
    assert len(prepared.pages[1]) < 100_000
    assert len(prepared.pages[0]) < 5_500_000


@pytest.mark.parametrize("place", [0, 1])
def test_text_of_samples_never_acts(prepared: Prepared, place: int) -> None:
    text = prepared.pages[place]
    assert MARKUP not in text
    page = Page(text)
    acting = [each for attributes, each in page.scripts if not attributes.get("type")]
    assert not any("alert" in each for each in acting)
    assert MARKUP in page.text.replace("\n", ""), "it is there to be read"


def test_rows_are_those_of_training(prepared: Prepared) -> None:
    samples = choose_samples(
        prepared.manifest,
        shards=prepared.shards,
        processor=prepared.processor,
        sample_costs=prepared.sample_costs,
    )
    assert [sample.source for sample in samples] == ["plain"] * 3 + ["marked"] * 3
    assert len(samples) == 2 * NUM_PER_SOURCE
    costs = load_costs(prepared.sample_costs, manifest=prepared.manifest, split="train")
    for sample in samples:
        assert sample.num_tokens in costs.column("num_tokens")
        assert sum(piece.num_tokens for piece in sample.pieces) == sample.num_tokens
        assert (sample.pictures[0] or "").startswith("data:image/png;base64,")
    learnt = {
        "".join(piece.text for piece in sample.pieces if piece.kind == "label")
        for sample in samples
    }
    assert learnt == {"It is blue.<|im_end|>", f"{MARKUP}<|im_end|>"}


def test_sources_add_up(prepared: Prepared) -> None:
    rows = source_rows(
        prepared.manifest, sample_costs=prepared.sample_costs, raw_samples=prepared.raw_samples
    )
    costs = load_costs(prepared.sample_costs, manifest=prepared.manifest, split="train")
    assert [row.name for row in rows] == ["plain", "marked"]
    assert sum(row.num_train for row in rows) == costs.num_samples
    assert sum(row.num_tokens for row in rows) == costs.column("num_tokens").sum()
    assert sum(row.num_label_tokens for row in rows) == costs.column("num_label_tokens").sum()
    for row in rows:
        assert row.num_train + row.num_heldout + row.num_refused == 20
        assert row.num_images == row.num_train + row.num_heldout


def test_refused_rows_have_pictures_where_there_are_any(prepared: Prepared) -> None:
    refusals = {
        row.reason: row
        for row in show_refused(
            prepared.quarantine, manifest=prepared.manifest, raw_samples=prepared.raw_samples
        )
    }
    small, missing = refusals["too_small"], refusals["missing_image"]
    assert (small.count, dict(small.by_source)) == (8, {"plain": 4, "marked": 4})
    assert len(small.examples) == MAX_PER_REASON
    assert all((row.picture or "").startswith("data:image/png") for row in small.examples)
    assert missing.count == 2
    assert [row.picture for row in missing.examples] == [None, None]
    page = Page(prepared.pages[0])
    assert page.text.count("no picture") == 2


def test_a_source_that_is_gone_still_has_its_refusals(prepared: Prepared) -> None:
    row = {"key": "old/1", "source": "old", "reason": "missing_image", "value": None}
    row |= {"detail": None, "image_file": "../../etc/passwd", "image_offset": None}
    table = pa.Table.from_pylist([row], schema=QUARANTINE)
    manifest = prepared.manifest.model_copy(update={"quarantined": {"old": {"missing_image": 1}}})
    (found,) = show_refused(table, manifest=manifest, raw_samples=prepared.raw_samples)
    assert (found.count, found.examples[0].picture, found.examples[0].value) == (1, None, "")


def test_unusable_samples_are_counted_and_shown(prepared: Prepared, tmp_path: Path) -> None:
    sample_costs = tmp_path / "costs"
    measured = measure(prepared.manifest, prepared.shards, prepared.processor, str(sample_costs))
    summary = pq.read_table(measured / "summary.parquet").to_pylist()
    path = measured / Path(summary[0]["path"]).with_suffix(".parquet")
    rows = pq.read_table(path).to_pylist()
    for row in rows[:4]:
        row["status"] = "no_label"
    pq.write_table(pa.Table.from_pylist(rows, schema=pq.read_schema(path)), path)
    summary[0] |= {"ok": summary[0]["ok"] - 4, "no_label": 4}
    schema = pq.read_schema(measured / "summary.parquet")
    pq.write_table(pa.Table.from_pylist(summary, schema=schema), measured / "summary.parquet")
    counted = source_rows(
        prepared.manifest, sample_costs=measured, raw_samples=prepared.raw_samples
    )
    samples = choose_samples(
        prepared.manifest,
        shards=prepared.shards,
        processor=prepared.processor,
        sample_costs=measured,
    )
    source = prepared.manifest.shards[0].source
    assert {row.name: row.unusable for row in counted if row.unusable} == {source: {"no_label": 4}}
    statuses = [sample.status for sample in samples if sample.source == source]
    assert statuses == ["ok"] * 3 + ["no_label"] * 2


def test_a_damaged_shard_stops_nothing(prepared: Prepared) -> None:
    manifest = prepared.manifest
    broken = manifest.shards[0].model_copy(update={"num_bytes": 1})
    changed = manifest.model_copy(update={"shards": (broken, *manifest.shards[1:])})
    identity = json.loads((prepared.sample_costs / "costs.json").read_text())
    samples = prepared.sample_costs.parent / "other_costs"
    samples.mkdir()
    for file in prepared.sample_costs.rglob("*.parquet"):
        target = samples / file.relative_to(prepared.sample_costs)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    identity["manifest_sha256"] = changed.sha256
    (samples / "costs.json").write_text(json.dumps(identity))
    shown = choose_samples(
        changed, shards=prepared.shards, processor=prepared.processor, sample_costs=samples
    )
    problems = [sample for sample in shown if sample.problem]
    assert problems
    assert all("the manifest says" in sample.problem for sample in problems)
