from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from diptych.core.errors import DataError, FormatError
from diptych.core.hashing import sha256_folder
from diptych.core.tables import SAMPLE_COSTS
from diptych.data.chat import to_chat
from diptych.data.costs import load_costs, measure
from diptych.data.images import decode
from diptych.data.processor import read_processor_info
from diptych.data.reader import ShardReader


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
        assert costs.num_tokens[row] == made["input_ids"].size
        assert costs.num_image_tokens[row] == (made["mm_token_type_ids"] == 1).sum()
        assert costs.num_patches[row] == (len(made["pixel_values"]) if images else 0)
        assert costs.num_images[row] == len(images)
        assert costs.area_px[row] == sum(image.width * image.height for image in images)
        aspect = images[0].width / images[0].height if images else 0
        assert costs.aspect[row] == np.float32(aspect)
        answers = [turn.text for turn in stored.sample.messages if turn.role == "assistant"]
        said = processor.tokenizer("".join(f"{answer}<|im_end|>" for answer in answers))
        assert costs.num_label_tokens[row] == len(said["input_ids"])


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


def test_equal_inputs_give_equal_bytes(corpus, tmp_path):
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
    other = corpus.manifest.model_copy(update={"num_quarantined": 99})
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


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "costs.json").unlink(), "There is no file"),
        (lambda folder: (folder / "costs.json").write_text("{"), "is damaged"),
        (lambda folder: next(folder.rglob("*.parquet")).unlink(), "cannot be read"),
        (lambda folder: next(folder.rglob("*.parquet")).write_bytes(b"PAR1"), "cannot be read"),
        (lambda folder: _halve(next(folder.rglob("*.parquet"))), r"has 8 rows.*samples"),
    ],
)
def test_damaged_costs_are_refused(corpus, tmp_path, damage, message):
    copy = tmp_path / "costs"
    shutil.copytree(corpus.sample_costs, copy)
    damage(copy)
    splits = [shard.split for shard in corpus.manifest.shards]
    with pytest.raises(FormatError, match=message):
        [load_costs(copy, manifest=corpus.manifest, split=split) for split in splits]


def _halve(path):
    pq.write_table(pq.read_table(path).slice(0, 8), path)


def test_a_sample_that_cannot_be_encoded_is_named(corpus, tmp_path):
    shard = corpus.manifest.shards[0]
    index = pq.read_table(corpus.shards / shard.index_path).to_pylist()[3]
    shards = tmp_path / "shards"
    shutil.copytree(corpus.shards, shards)
    with (shards / shard.path).open("r+b") as file:
        file.seek(index["offsets"][-1])
        text = file.read(index["lengths"][-1]).decode()
        document = json.loads(text)
        document["messages"][0]["text"] = "<image><image><image>"
        document["images"] = []
        changed = json.dumps(document, separators=(",", ":"))
        assert len(changed) <= len(text)
        file.seek(index["offsets"][-1])
        file.write(changed.ljust(len(text)).encode())
    with pytest.raises(DataError, match=rf"'{index['key']}' cannot be encoded: 3 times '<image>'"):
        measure(corpus.manifest, shards, corpus.processor, str(tmp_path / "costs"))
    assert not (tmp_path / "costs").exists()
