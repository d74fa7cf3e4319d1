from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diptych.core.errors import FormatError
from diptych.core.hashing import sha256_folder
from diptych.core.tables import SAMPLE_COSTS
from diptych.data.chat import ChatTokenizer, to_chat
from diptych.data.costs import SUMMARY_NAME, Totals, load_costs, measure
from diptych.data.images.decode import decode
from diptych.data.measure import measure_sample
from diptych.data.processor import read_processor_info
from diptych.data.shards.reader import ShardReader
from tests.data.synthetic import make_costs


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_costs_are_what_transformers_makes(corpus, split):
    from PIL import Image
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(corpus.processor, local_files_only=True)
    costs = load_costs(corpus.sample_costs, manifest=corpus.manifest, split=split)
    reader = ShardReader(corpus.shards, manifest=corpus.manifest, split=split)
    assert costs.num_samples == len(reader) > 0
    for row in range(len(reader)):
        stored = reader.read(row)
        text = processor.apply_chat_template(to_chat(stored.sample.messages), tokenize=False)
        images = [Image.fromarray(decode(data)) for data in stored.images]
        made = processor(text=[text], images=images or None, return_tensors="np")
        measured = costs.take(np.array([row]))
        assert measured.usable
        assert measured.num_tokens == made["input_ids"].size
        assert measured.num_image_tokens == (made["mm_token_type_ids"] == 1).sum()
        assert measured.num_patches == (len(made["pixel_values"]) if images else 0)
        assert measured.num_images == len(images)
        assert measured.area_px == sum(image.width * image.height for image in images)
        aspect = images[0].width / images[0].height if images else 0
        assert measured.aspect == np.float32(aspect)
        answers = [turn.text for turn in stored.sample.messages if turn.role == "assistant"]
        said = processor.tokenizer("".join(f"{answer}<|im_end|>" for answer in answers))
        assert measured.num_label_tokens == len(said["input_ids"])


def test_rows_stand_in_the_shards_order(corpus):
    for split in ("train", "heldout"):
        reader = ShardReader(corpus.shards, manifest=corpus.manifest, split=split)
        shards = [shard for shard in corpus.manifest.shards if shard.split == split]
        tables = [
            pq.read_table(corpus.sample_costs / shard.path.replace(".tar", ".parquet"))
            for shard in shards
        ]
        assert all(table.schema.equals(SAMPLE_COSTS) for table in tables)
        keys = [key for table in tables for key in table["key"].to_pylist()]
        assert keys == reader.keys.to_pylist()
        costs = load_costs(corpus.sample_costs, manifest=corpus.manifest, split=split)
        assert np.diff(costs.shard_starts).tolist() == [shard.num_samples for shard in shards]


@pytest.mark.parametrize("few_samples", [0, 10**6], ids=["processes", "in_process"])
def test_equal_inputs_give_equal_bytes(corpus, tmp_path, monkeypatch, few_samples):
    monkeypatch.setattr("diptych.data.costs._FEW_SAMPLES", few_samples)
    again = measure(corpus.manifest, corpus.shards, corpus.processor, str(tmp_path / "again"))
    assert sha256_folder(again) == sha256_folder(corpus.sample_costs)
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


def test_it_knows_no_torch(corpus, tmp_path):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from diptych.core.records import Manifest\n"
        "from diptych.data.costs import measure\n"
        "manifest, shards, processor, folder = sys.argv[1:]\n"
        "manifest = Manifest.model_validate_json(Path(manifest).read_text())\n"
        "measure(manifest, Path(shards), Path(processor), folder)\n"
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))\n"
    )
    paths = [corpus.manifest_path, corpus.shards, corpus.processor, tmp_path / "costs"]
    result = subprocess.run([sys.executable, "-c", code, *map(str, paths)], check=False)
    assert result.returncode == 0


def test_costs_of_other_data_are_refused(corpus):
    other = corpus.manifest.model_copy(update={"quarantined": {"toy": {"malformed_row": 99}}})
    with pytest.raises(FormatError, match=r"manifest_sha256.*pipelines=prepare"):
        load_costs(corpus.sample_costs, manifest=other, split="train")


def test_costs_of_another_processor_are_refused(corpus):
    sha256 = read_processor_info(corpus.processor).sha256
    costs = load_costs(
        corpus.sample_costs, manifest=corpus.manifest, split="train", processor_sha256=sha256
    )
    assert costs.processor_sha256 == sha256
    with pytest.raises(FormatError, match="processor_sha256"):
        load_costs(
            corpus.sample_costs,
            manifest=corpus.manifest,
            split="train",
            processor_sha256="0" * 64,
        )


def read_all(folder, *, manifest):
    for split in ("train", "heldout"):
        load_costs(folder, manifest=manifest, split=split).column("num_tokens")


def shard_of(folder):
    return next(path for path in folder.rglob("*.parquet") if path.name != SUMMARY_NAME)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "costs.json").unlink(), "There is no file"),
        (lambda folder: (folder / "costs.json").write_text("{"), "is damaged"),
        (lambda folder: (folder / SUMMARY_NAME).unlink(), "cannot be read"),
        (lambda folder: _halve(folder / SUMMARY_NAME, rows=0), "lack '.*tar'"),
        (lambda folder: shard_of(folder).unlink(), "cannot be read"),
        (lambda folder: shard_of(folder).write_bytes(b"PAR1"), "cannot be read"),
        (lambda folder: _halve(shard_of(folder), rows=8), r"has 8 rows.*samples"),
        (lambda folder: _drop(shard_of(folder), column="status"), "has no column status"),
        (lambda folder: _empty(shard_of(folder), column="area_px"), r"lacks \d+ numbers"),
        (lambda folder: _empty(folder / SUMMARY_NAME, column="num_samples"), r"lacks \d+ numbers"),
    ],
)
def test_damaged_costs_are_refused(corpus, tmp_path, damage, message):
    copy = tmp_path / "costs"
    shutil.copytree(corpus.sample_costs, copy)
    damage(copy)
    with pytest.raises(FormatError, match=message):
        read_all(copy, manifest=corpus.manifest)


def _halve(path, *, rows):
    pq.write_table(pq.read_table(path).slice(0, rows), path)


def _empty(path, *, column):
    table = pq.read_table(path)
    place = table.schema.get_field_index(column)
    kind = table.schema.field(column).type
    pq.write_table(table.set_column(place, column, pa.nulls(len(table), kind)), path)


def _drop(path, *, column):
    pq.write_table(pq.read_table(path).drop_columns([column]), path)


def change(document, **fields):
    """Change a sample's first turn, or leave text that is no JSON."""
    if "damaged" in fields:
        return "{"
    document["messages"][0].update(fields)
    return json.dumps(document, separators=(",", ":"))


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"text": "<image><image>"}, "unencodable"),
        ({"text": "<image><|image_pad|>"}, "special_token"),
        ({"damaged": True}, "damaged"),
    ],
)
def test_a_sample_that_no_batch_can_take_stops_nothing(corpus, tmp_path, fields, status):
    shard = corpus.manifest.shards[0]
    index = pq.read_table(corpus.shards / shard.index_path).to_pylist()
    row = next(number for number, entry in enumerate(index) if len(entry["widths_px"]) == 1)
    shards = tmp_path / "shards"
    shutil.copytree(corpus.shards, shards)
    with (shards / shard.path).open("r+b") as file:
        offset, length = index[row]["offsets"][-1], index[row]["lengths"][-1]
        file.seek(offset)
        changed = change(json.loads(file.read(length)), **fields)
        assert len(changed) <= length
        file.seek(offset)
        file.write(changed.ljust(length).encode())
    folder = measure(corpus.manifest, shards, corpus.processor, str(tmp_path / "costs"))
    before = load_costs(corpus.sample_costs, manifest=corpus.manifest, split=shard.split)
    after = load_costs(folder, manifest=corpus.manifest, split=shard.split)
    assert (before.num_unusable, after.num_unusable) == ({}, {status: 1})
    assert np.flatnonzero(~after.column("usable")).tolist() == [row]
    assert after.totals.num_samples == before.totals.num_samples - 1
    assert after.totals.num_tokens == before.totals.num_tokens - before.shard(0).num_tokens[row]


def test_a_sample_without_labels_is_not_usable(corpus):
    """No assistant speaks in it: there is nothing to learn."""
    info = read_processor_info(corpus.processor)
    row = measure_sample(
        b'{"messages": [{"role": "user", "text": "Hello"}]}',
        entry={"key": "toy/1", "widths_px": [], "heights_px": []},
        tokenizer=ChatTokenizer(corpus.processor),
        info=info,
    )
    assert (row["status"], row["num_label_tokens"]) == ("no_label", 0)
    assert row["num_tokens"] > 0


def test_the_summary_sums_up_the_shards(corpus):
    costs = load_costs(corpus.sample_costs, manifest=corpus.manifest, split="train")
    tokens, patches = costs.column("num_tokens").astype(np.int64), costs.column("num_patches")
    assert costs.totals == Totals(
        num_samples=costs.num_samples,
        num_tokens=tokens.sum(),
        squared_tokens=(tokens**2).sum(),
        num_label_tokens=costs.column("num_label_tokens").sum(),
        num_image_tokens=costs.column("num_image_tokens").sum(),
        num_patches=patches.sum(),
        max_tokens=tokens.max(),
        max_patches=patches.max(),
    )
    named = [costs.sources[place] for place in costs.shard_sources]
    assert named == [s.source for s in corpus.manifest.shards if s.split == "train"]


def test_samples_are_gathered_in_the_order_given():
    costs = make_costs(50, shard_starts=[0, 10, 10, 30, 50])
    samples = np.random.default_rng(0).integers(0, 50, 200)
    taken = costs.take(samples)
    for name in ("num_tokens", "num_patches", "area_px", "aspect", "usable"):
        np.testing.assert_array_equal(getattr(taken, name), costs.column(name)[samples])
        assert getattr(taken, name).dtype == costs.column(name).dtype
    assert len(costs.take(samples[:0]).num_tokens) == 0


def test_few_shards_are_kept():
    costs = make_costs(1_000, shard_starts=range(0, 1_001, 5))
    costs.column("num_tokens")
    assert len(costs._kept) == 64
    costs.keep(100)
    costs.column("num_tokens")
    assert len(costs._kept) == 100


def test_costs_travel_to_loader_workers(corpus):
    costs = load_costs(corpus.sample_costs, manifest=corpus.manifest, split="train")
    costs.shard(0)
    arrived = pickle.loads(pickle.dumps(costs))
    assert arrived.column("num_tokens").tolist() == costs.column("num_tokens").tolist()
