"""Look at every raw sample once: what can be used becomes an index, the rest is quarantined.

In: `raw_samples`. Out: `sample_index` and `quarantine` (columns in `core/tables.py`); every row
read is in exactly one of them. Parts are surveyed one by one, in processes; then their hashes alone
decide on splits, duplicates and leaks (`splits.py`), and the surveys are rewritten without what was
refused. The same input gives the same bytes whatever the number of processes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diptych.core.errors import DataError
from diptych.core.files import replacing_folder
from diptych.core.records import RawSamples, RawSource
from diptych.core.tables import QUARANTINE, SAMPLE_INDEX
from diptych.data.executor import LOCAL, ExecutorParams, opened_pool
from diptych.data.indexing.examine import IndexParams
from diptych.data.indexing.files import ParquetFile, opened_work, read_work
from diptych.data.indexing.splits import (
    KEPT,
    OPEN,
    SPLITS,
    VERDICTS,
    Claims,
    Decisions,
    decide,
)
from diptych.data.indexing.survey import Survey, plan_surveys, printable, survey
from diptych.data.reasons import REASONS, UNCOUNTED

__all__ = ["REASONS", "IndexParams", "index"]

_EXAMPLES_PER_REASON = 3
_SMALL_BYTES = 64 * 1024**2
_SMALL_FILES = {"header": 30_000, "decode": 1_000}
"""By what is verified: to decode an image takes some milliseconds."""
_BYTES_PER_ROW = 256
_DETAILS = {
    "duplicate_id": "An earlier row has the same id",
    "duplicate_content": "The sample '{twin}' has the same messages and images",
    "leaks_into_train": "The training sample '{twin}' has the same text and images",
    "image_leaks_into_train": "The training sample '{twin}' has one of its images",
}
_NIBBLES = np.zeros(256, dtype=np.uint8)
_NIBBLES[np.frombuffer(b"0123456789abcdef", dtype=np.uint8)] = np.arange(16)


def index(
    raw_samples: RawSamples, params: IndexParams, folder: str, executor: ExecutorParams = LOCAL
) -> tuple[Path, pa.Table]:
    """Check every raw sample.

    Args:
        raw_samples: The sources.
        params: Limits.
        folder: Where `sample_index` goes; it is replaced at once or not at all. A run that was
            stopped leaves its finished parts beside it, from which the next goes on.
        executor: Where parts are surveyed and rewritten.

    Returns:
        The folder of `sample_index`, in the order of the sources, and `quarantine`.

    Raises:
        DataError: More than `max_quarantined_fraction` of the samples were refused (the message
            counts the reasons and gives examples), or no sample is left.
    """
    target = Path(folder)
    work = target.with_name(f".{target.name}.parts")
    work.mkdir(parents=True, exist_ok=True)
    tasks: list[Survey] = []
    plan = _plan(raw_samples, params=params, folder=work, tasks=tasks)
    is_small = _is_small(raw_samples, params=params)
    with opened_pool(executor, num_processes=params.num_processes, is_small=is_small) as pool:
        counts = list(pool(survey, plan))
        starts = np.cumsum([0, *counts], dtype=np.int64)
        decisions = decide(
            _claim(tasks, counts=counts), duplicates=params.duplicates, leakage=params.leakage
        )
        quarantine = _quarantine(tasks, starts=starts, decisions=decisions)
        num_ok = int((decisions.verdicts == KEPT).sum())
        _check_fraction(quarantine, num_ok=num_ok, allowed=params.max_quarantined_fraction)
        with replacing_folder(target) as partial:
            rewrites = _rewrites(tasks, starts=starts, decisions=decisions, folder=partial)
            for _ in pool(_rewrite, rewrites):
                pass
    shutil.rmtree(work)
    return target, quarantine


def _is_small(raw_samples: RawSamples, *, params: IndexParams) -> bool:
    """Tell whether starting processes would take longer than the work."""
    num_bytes = sum(part.num_bytes for source in raw_samples.sources for part in source.parts)
    num_files = sum(_count_images(source) for source in raw_samples.sources)
    return num_bytes < _SMALL_BYTES and num_files < _SMALL_FILES[params.verify]


def _count_images(source: RawSource) -> int:
    """Count a source's files of images, if they are files; about, where they were not listed."""
    if source.num_image_files is not None or source.kind not in ("llava", "csv"):
        return source.num_image_files or 0
    return sum(part.num_bytes for part in source.parts) // _BYTES_PER_ROW


def _plan(
    raw_samples: RawSamples, *, params: IndexParams, folder: Path, tasks: list[Survey]
) -> Iterator[Survey]:
    """Yield the surveys; `tasks` keeps them without the rows, which only some at a time can be."""
    for source in raw_samples.sources:
        for part in source.parts:
            for task in plan_surveys(source, part=part, params=params, folder=folder):
                tasks.append(replace(task, raw=None))
                yield task


def _claim(tasks: Sequence[Survey], *, counts: Sequence[int]) -> Claims:
    """Read the hashes of all parts."""
    keys, contents, images, num_images = [], [], [], []
    for task in tasks:
        table = read_work(task.rows, columns=["key_hash", "content_hash", "image_hashes"])
        lists = table["image_hashes"].combine_chunks()
        keys.append(_binary_to_numbers(table["key_hash"].combine_chunks()))
        contents.append(_hex_to_numbers(table["content_hash"].combine_chunks()))
        images.append(_hex_to_numbers(lists.flatten()))
        num_images.append(lists.value_lengths().to_numpy(zero_copy_only=False))
    names = [
        OPEN if task.source.split is None else SPLITS.index(task.source.split) for task in tasks
    ]
    fractions = [task.source.heldout_fraction for task in tasks]
    nothing = np.empty((0, 2), dtype=np.uint64)
    return Claims(
        keys=np.concatenate([nothing, *keys]),
        contents=np.concatenate([nothing, *contents]),
        images=np.concatenate([nothing, *images]),
        image_starts=np.cumsum(np.concatenate([[0], *num_images]), dtype=np.int64),
        splits=np.repeat(np.array(names, dtype=np.int8), counts),
        heldout_fractions=np.repeat(np.array(fractions, dtype=np.float32), counts),
    )


def _hex_to_numbers(hashes: pa.StringArray) -> np.ndarray:
    """Turn texts of 32 hexadecimal digits into [N, 2] uint64."""
    if not len(hashes):
        return np.empty((0, 2), dtype=np.uint64)
    digits = np.frombuffer(hashes.buffers()[2], dtype=np.uint8)
    start = hashes.offset * 32
    nibbles = _NIBBLES[digits[start : start + len(hashes) * 32]].reshape(-1, 2)
    return (nibbles[:, 0] << 4 | nibbles[:, 1]).view(">u8").astype(np.uint64).reshape(-1, 2)


def _binary_to_numbers(hashes: pa.FixedSizeBinaryArray) -> np.ndarray:
    """Turn values of 16 bytes into [N, 2] uint64."""
    if not len(hashes):
        return np.empty((0, 2), dtype=np.uint64)
    data = np.frombuffer(hashes.buffers()[1], dtype=">u8")[hashes.offset * 2 :]
    return data[: len(hashes) * 2].astype(np.uint64).reshape(-1, 2)


def _quarantine(tasks: Sequence[Survey], *, starts: np.ndarray, decisions: Decisions) -> pa.Table:
    """Put together what was refused, part after part: first its own rows, then those by others."""
    twins = _TwinKeys(tasks, starts=starts, decisions=decisions)
    tables = [QUARANTINE.empty_table()]
    for number, task in enumerate(tasks):
        tables.append(read_work(task.refused))
        first, last = starts[number], starts[number + 1]
        refused = np.flatnonzero(decisions.verdicts[first:last] != KEPT)
        if not len(refused):
            continue
        names = ["key", "label", "image_names", "image_files", "image_offsets", "image_lengths"]
        rows = read_work(task.rows, columns=names).take(pa.array(refused)).to_pylist()
        found = [
            _refused_row(
                row,
                source=task.source.name,
                reason=VERDICTS[int(decisions.verdicts[first + place])],
                twin=twins.key(int(decisions.twins[first + place])),
            )
            for row, place in zip(rows, refused, strict=True)
        ]
        tables.append(pa.Table.from_pylist(found, schema=QUARANTINE))
    return pa.concat_tables(tables).combine_chunks()


def _refused_row(row: dict[str, Any], *, source: str, reason: str, twin: str) -> dict[str, Any]:
    has_image = bool(row["image_names"])
    return {
        "key": row["key"],
        "source": source,
        "reason": reason,
        "value": printable(twin),
        "detail": printable(f"{row['label']}: {_DETAILS[reason].format(twin=twin)}"),
        "image_path": row["image_names"][0] if has_image else None,
        "image_file": row["image_files"][0] if has_image else None,
        "image_offset": row["image_offsets"][0] if has_image else None,
        "image_length": row["image_lengths"][0] if has_image else None,
    }


class _TwinKeys:
    """The keys of the samples because of which others were refused."""

    def __init__(
        self, tasks: Sequence[Survey], *, starts: np.ndarray, decisions: Decisions
    ) -> None:
        self._numbers = np.unique(decisions.twins[decisions.twins >= 0])
        cuts = np.searchsorted(self._numbers, starts)
        keys = [pa.array([], pa.string())]
        for number, task in enumerate(tasks):
            wanted = self._numbers[cuts[number] : cuts[number + 1]] - starts[number]
            if len(wanted):
                table = read_work(task.rows, columns=["key"]).take(pa.array(wanted))
                keys += table["key"].chunks
        self._keys = pa.concat_arrays(keys)

    def key(self, number: int) -> str:
        """Return a twin's key by its number among all samples."""
        return self._keys[int(np.searchsorted(self._numbers, number))].as_py()


@dataclass(frozen=True, slots=True)
class _Rewrite:
    """One part of the survey on its way into the index; [number of rows] int8 each."""

    rows: Path
    target: Path
    verdicts: np.ndarray
    splits: np.ndarray


def _rewrites(
    tasks: Sequence[Survey], *, starts: np.ndarray, decisions: Decisions, folder: Path
) -> Iterator[_Rewrite]:
    """Name the parts so that the order of names is that of sources and parts."""
    for number, task in enumerate(tasks):
        part = slice(starts[number], starts[number + 1])
        yield _Rewrite(
            rows=task.rows,
            target=folder / f"{number:06d}-{task.source.name}.parquet",
            verdicts=decisions.verdicts[part],
            splits=decisions.splits[part],
        )


def _rewrite(task: _Rewrite) -> None:
    """Write a part with its splits and without what was refused; an empty one is not written."""
    if not (task.verdicts == KEPT).any():
        return
    names = pa.array(SPLITS)
    first = 0
    target = ParquetFile(task.target, schema=SAMPLE_INDEX)
    with opened_work(task.rows) as survey, target as file:
        for number in range(survey.num_record_batches):
            table = pa.Table.from_batches([survey.get_batch(number)])
            part = slice(first, first + table.num_rows)
            first += table.num_rows
            table = table.append_column("split", names.take(pa.array(task.splits[part])))
            kept = task.verdicts[part] == KEPT
            if not kept.all():
                table = table.filter(pa.array(kept))
            if table.num_rows:
                file.write(table.select(SAMPLE_INDEX.names))


def _check_fraction(quarantine: pa.Table, *, num_ok: int, allowed: float) -> None:
    refused = quarantine.filter(~pc.field("reason").isin(sorted(UNCOUNTED)))
    total = num_ok + refused.num_rows
    if num_ok and refused.num_rows <= allowed * total:
        return
    if not total:
        raise DataError(
            "The sources hold no sample", cure="Check the annotation files: they have no rows"
        )
    lines = [
        f"{refused.num_rows:,} of {total:,} samples ({refused.num_rows / total:.1%}) "
        "cannot be used",
        *_reason_lines(refused),
    ]
    raise DataError(
        "\n".join(lines),
        allowed=f"Allowed: at most {allowed:.1%} (max_quarantined_fraction), and one usable sample",
        cure="Correct these samples, or raise prepare.index.max_quarantined_fraction",
    )


def _reason_lines(refused: pa.Table) -> Iterator[str]:
    counts = refused["reason"].value_counts().to_pylist()
    for found in sorted(counts, key=lambda found: (-found["counts"], found["values"])):
        reason = found["values"]
        yield f"  {reason}: {found['counts']:,}. {REASONS[reason]}"
        for row in refused.filter(pc.field("reason") == reason)[:_EXAMPLES_PER_REASON].to_pylist():
            yield f"    {row['key']}: {row['detail']} ({row['value']})"
