"""Index raw samples and look at the whole result."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

from diptych.core.records import RawSamples
from diptych.core.tables import SAMPLE_INDEX, read_parts
from diptych.data.indexing.index import IndexParams, index
from tests.data.conftest import Dataset

LENIENT = IndexParams(max_quarantined_fraction=1.0)


@pytest.fixture
def look(dataset: Dataset) -> Callable[..., tuple[pa.Table, pa.Table]]:
    """Index raw samples; returns the whole index as one table, and the quarantine."""

    def run(
        raw_samples: RawSamples | None = None, params: IndexParams = LENIENT
    ) -> tuple[pa.Table, pa.Table]:
        raw_samples = dataset.write() if raw_samples is None else raw_samples
        folder, quarantine = index(raw_samples, params, str(dataset.folder / "sample_index"))
        return pa.concat_tables([SAMPLE_INDEX.empty_table(), *read_parts(folder)]), quarantine

    return run
