"""In: everything that `prepare` made. Out: its figures, `data_page`, a short form for the report.

All are drawn before anything is trained: the sources with what they add up to, the figures that
`chart` draws, samples with the exact label mask over their tokens, and the refused rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from diptych.core.records import Buckets, Manifest, RawSamples, ScheduleSpec
from diptych.data.costs import STATUSES, Costs, load_costs
from diptych.report.chart import chart
from diptych.report.refused import show_refused
from diptych.report.render import render_page, render_part
from diptych.report.samples import MAX_SOURCES, choose_samples

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

FIGURES = ("bucket_grid", "sample_lengths", "image_aspects", "batch_waste")
"""The figures that `chart` returns, in its order."""


@dataclass(frozen=True)
class SourceRow:
    """One line of the table of sources.

    Attributes:
        name: the source.
        repeat: how often an epoch takes each of its samples; None: it is no longer a source.
        num_train: its training samples.
        num_heldout: its held-out samples.
        num_images: images of both.
        num_usable: samples of both splits that a batch can take; the next three are of these.
        num_tokens: text and image tokens.
        num_label_tokens: tokens that are learnt.
        num_image_tokens: tokens that images are.
        unusable: the number of the other samples, by status.
        num_refused: quarantined rows.
    """

    name: str
    repeat: float | None
    num_train: int
    num_heldout: int
    num_images: int
    num_usable: int
    num_tokens: int
    num_label_tokens: int
    num_image_tokens: int
    unusable: dict[str, int]
    num_refused: int


def show(
    manifest: Manifest,
    shards: Path,
    processor: Path,
    sample_costs: Path,
    quarantine: pa.Table,
    raw_samples: RawSamples,
    buckets: Buckets,
    schedule: ScheduleSpec,
) -> tuple[Figure, Figure, Figure, Figure, str, str]:
    """Draw the prepared data for a person.

    Args:
        manifest: names the shards.
        shards: the folder they lie in.
        processor: the processor's folder.
        sample_costs: the folder of every sample's lengths.
        quarantine: the rows that were refused.
        raw_samples: the sources, for the pictures of refused rows.
        buckets: the boundaries of image area and aspect.
        schedule: the settings that the batches will be made with.

    Returns:
        `bucket_grid`, `sample_lengths`, `image_aspects`, `batch_waste`; `data_page`, one HTML
        document; and `data_section`, a part of the run's report.
    """
    figures = chart(manifest, sample_costs=sample_costs, buckets=buckets, schedule=schedule)
    samples = choose_samples(
        manifest, shards=shards, processor=processor, sample_costs=sample_costs
    )
    sources = source_rows(manifest, sample_costs=sample_costs, raw_samples=raw_samples)
    context: dict[str, Any] = {
        "manifest": manifest,
        "sources": sources,
        "statuses": STATUSES,
        "found_statuses": sorted({status for row in sources for status in row.unusable}),
        "num_unusable": sum(sum(row.unusable.values()) for row in sources),
        "samples": samples,
        "num_hidden_sources": max(len(manifest.sources) - MAX_SOURCES, 0),
        "refusals": show_refused(quarantine, manifest=manifest, raw_samples=raw_samples),
        "figures": {name: figure.to_json() for name, figure in zip(FIGURES, figures, strict=True)},
    }
    return (
        *figures,
        render_page("data.html", context=context),
        render_part("data_section.html", context=context),
    )


def source_rows(
    manifest: Manifest, *, sample_costs: Path, raw_samples: RawSamples
) -> list[SourceRow]:
    """Add up every source; one of which all rows were refused is there too.

    Args:
        manifest: names the shards and counts the refused rows.
        sample_costs: the folder of every sample's lengths.
        raw_samples: the sources with their repeats.
    """
    splits = [
        load_costs(sample_costs, manifest=manifest, split=split) for split in ("train", "heldout")
    ]
    repeats = {source.name: source.repeat for source in raw_samples.sources}
    names = dict.fromkeys([*repeats, *manifest.sources, *manifest.quarantined])
    rows = []
    for name in names:
        train, heldout = (_sum_up(costs, source=name) for costs in splits)
        total = Counter(train) + Counter(heldout)
        rows.append(
            SourceRow(
                name=name,
                repeat=repeats.get(name),
                num_train=train.get("num_samples", 0),
                num_heldout=heldout.get("num_samples", 0),
                num_images=sum(
                    shard.num_images for shard in manifest.shards if shard.source == name
                ),
                num_usable=total["ok"],
                num_tokens=total["num_tokens"],
                num_label_tokens=total["num_label_tokens"],
                num_image_tokens=total["num_image_tokens"],
                unusable={
                    status: total[status] for status in STATUSES if status != "ok" and total[status]
                },
                num_refused=sum(manifest.quarantined.get(name, {}).values()),
            )
        )
    return rows


def _sum_up(costs: Costs, *, source: str) -> dict[str, int]:
    """Sum the summary's columns over the shards of one source."""
    if source not in costs.sources:
        return {}
    is_source = costs.shard_sources == costs.sources.index(source)
    return {name: int(values[is_source].sum()) for name, values in costs.summary.items()}
