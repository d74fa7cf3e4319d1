"""The starter data, prepared as the base's settings say, and the runs that recipes make of it.

In: a folder to work in, recipes of `conf/` by name, settings that differ. Out: run specs, which
`launch` trains. Every node is called as the pipelines call it, with the same parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedro.config import OmegaConfigLoader

from diptych.core.files import write_text
from diptych.core.records import Buckets, Cluster, Manifest, RawSamples, Run, RunSpec
from diptych.data.bucket import BucketParams, bucket
from diptych.data.costs import measure
from diptych.data.indexing.index import IndexParams, index
from diptych.data.processor import ProcessorParams, fit
from diptych.data.shards.shard import ShardParams, shard
from diptych.data.sources import SourceParams, gather
from diptych.launch.launch import launch
from diptych.model.inspect import inspect
from diptych.model.revision import pin
from diptych.plan.hardware import ClusterParams, survey
from diptych.plan.search import search
from diptych.settings import CONFIG_LOADER_ARGS
from diptych.staging import StagePlan
from diptych.train.compose import Folders, TrainParams, compose

CONF = Path(__file__).parents[1] / "conf"


@dataclass(frozen=True)
class Starter:
    """What `prepare` and `survey` leave behind, once for all runs."""

    folders: Folders
    raw_samples: RawSamples
    buckets: Buckets
    manifest: Manifest
    cluster: Cluster


def read_parameters(recipe: str) -> dict[str, Any]:
    """Read a recipe's parameters, merged with the base's."""
    return OmegaConfigLoader(conf_source=str(CONF), env=recipe, **CONFIG_LOADER_ARGS)["parameters"]


def prepare_starter(folder: Path) -> Starter:
    """Build the digits in a folder and prepare them."""
    given = read_parameters("base")
    places = Folders(**{name: str(folder / path) for name, path in given["folders"].items()})
    prepare = given["prepare"]
    sources = {
        name: SourceParams(**{**source, "path": str(folder / source["path"])})
        for name, source in prepare["sources"].items()
    }
    raw_samples = gather(sources)
    sample_index, quarantine = index(
        raw_samples, IndexParams(**prepare["index"]), places.sample_index
    )
    shards, manifest = shard(
        sample_index, raw_samples, quarantine, ShardParams(**prepare["shards"]), places.shards
    )
    processor = fit(sample_index, ProcessorParams(**prepare["processor"]), places.processor)
    measure(manifest, shards, processor, places.sample_costs)
    write_text(Path(places.manifest), text=manifest.model_dump_json())
    return Starter(
        folders=places,
        raw_samples=raw_samples,
        buckets=bucket(sample_index, BucketParams(**prepare["buckets"])),
        manifest=manifest,
        cluster=survey(ClusterParams(**given["plan"]["cluster"])),
    )


def compose_run(
    starter: Starter,
    *,
    recipe: str,
    train: Mapping[str, Any],
    schedule: Mapping[str, Any] | None = None,
    layout: Mapping[str, Any] | None = None,
) -> RunSpec:
    """Compose a recipe's run.

    Args:
        starter: the prepared data.
        recipe: a folder of `conf/`.
        train: what differs from its `train`, and likewise the next two.
        schedule: from `train.schedule`.
        layout: from `plan.layout`.
    """
    given = read_parameters(recipe)
    given["train"]["schedule"] |= schedule or {}
    given["plan"]["layout"] |= layout or {}
    asked = StagePlan(model=given["plan"]["model"], layout=given["plan"]["layout"])
    params = TrainParams(**{**given["train"], **train})
    plan = search(
        inspect(asked.model),
        starter.cluster,
        Path(starter.folders.sample_costs),
        params.schedule,
        asked.layout,
    )
    return compose(
        plan,
        starter.raw_samples,
        starter.manifest,
        Path(starter.folders.processor),
        starter.buckets,
        pin(asked.model),
        params,
        starter.folders,
    )


def train_run(starter: Starter, spec: RunSpec) -> Run:
    """Launch a run, and follow it to its end."""
    folders = starter.folders
    return launch(spec, Path(folders.sample_costs), Path(folders.shards), folders.runs)
