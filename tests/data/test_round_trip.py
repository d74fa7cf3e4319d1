"""Our own shards, shown to Energon, come back as a source with the same samples."""

from __future__ import annotations

import json

from diptych.core.tables import read_parts
from diptych.data.indexing.index import IndexParams, index
from diptych.data.shards.energon import export_energon
from diptych.data.sources import SourceParams, gather


def test_shards_are_a_source_again(corpus, tmp_path):
    folder = export_energon(corpus.manifest, shards=corpus.shards, folder=tmp_path / "energon")
    raw_samples = gather({"again": SourceParams(kind="energon", path=str(folder))})
    found, quarantine = index(raw_samples, IndexParams(), str(tmp_path / "index"))
    assert quarantine.to_pylist() == []
    columns = ["split", "messages", "image_hashes", "widths_px", "heights_px", "kinds"]

    def contents(index_folder):
        rows = [
            row for part in read_parts(index_folder, columns=columns) for row in part.to_pylist()
        ]
        return sorted(json.dumps(row) for row in rows)

    assert contents(found) == contents(corpus.sample_index)
