"""What a rank trains with: a run spec in, an engine, a schedule and a loader out.

It composes the parts (data, model, layout) that do not know each other; the loop that runs them is
not known here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from diptych.core.hashing import sha256_json
from diptych.core.records import LoaderState, Manifest, RunSpec, WhatTrains
from diptych.data.batcher import Batcher
from diptych.data.collate import MicroBatch, Multiples
from diptych.data.costs import load_costs
from diptych.data.images.features import Features
from diptych.data.loader import Loader, heldout_batches
from diptych.data.processor import read_processor_info
from diptych.data.schedule.schedule import Schedule
from diptych.data.shards.manifest import load_manifest
from diptych.model.assemble import build
from diptych.model.attention import kernels
from diptych.model.families import family_name, torch_side, units
from diptych.model.features import feature_width, freeze, take_features, vision_sha256
from diptych.model.streaming import Reading
from diptych.parallel import mesh
from diptych.parallel.engine import Engine
from diptych.parallel.mesh import World
from diptych.parallel.spread import spread
from diptych.shape.attention import Choice
from diptych.train.features import fill
from diptych.train.optimizers import build_optimizer
from diptych.train.step import LossModule
from diptych.train.trains import what_trains

_LOG = logging.getLogger("diptych.worker")


@dataclass(frozen=True)
class Parts:
    """What a rank trains with."""

    engine: Engine
    schedule: Schedule
    manifest: Manifest
    features: Features | None
    trains: WhatTrains
    attention: Choice


def assemble(spec: RunSpec, *, world: World) -> Parts:
    """Build the model, spread it over the ranks, and make the schedule of its batches."""
    identity, placement = spec.identity, spec.placement
    info = read_processor_info(Path(placement.processor))
    manifest = load_manifest(Path(placement.manifest))
    # Features of a frozen tower are computed by a model that is whole on every rank.
    streams = identity.model.has_files and placement.vision_features is None
    model = build(
        identity.model,
        tokens=info.tokens,
        image=info.image,
        seed=identity.seed,
        device="meta" if streams else "cpu",
    )
    weights = None
    if streams:
        weights = Reading(model, spec=identity.model, seed=identity.seed, device=world.device)
    else:
        nn.Module.to(model, world.device)
    freeze(model, frozen=identity.model.freeze)
    attention = _choose_attention(model, spec=spec, world=world)
    features = _features(model, spec=spec, manifest=manifest, world=world)
    tables: list[WhatTrains] = []

    def build_and_table(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = build_optimizer(model, spec=identity.optimizer, ema_decay=identity.ema_decay)
        # Now, for DeepSpeed puts flat weights in the place of the model's.
        tables.append(what_trains(model, optimizer=optimizer))
        return optimizer

    engine = spread(
        LossModule(
            model,
            num_sources=len(manifest.sources),
            options=placement.layout.memory,
            label_smoothing=identity.label_smoothing,
            contrast=identity.contrast,
        ),
        model=model,
        units=units(model),
        layout=placement.layout,
        world=world,
        build_optimizer=build_and_table,
        weights=weights,
    )
    costs = load_costs(
        Path(placement.sample_costs),
        manifest=manifest,
        split="train",
        processor_sha256=identity.processor_sha256,
    )
    return Parts(
        engine=engine,
        schedule=Schedule(costs, buckets=identity.buckets, spec=identity.schedule),
        manifest=manifest,
        features=features,
        trains=tables[0],
        attention=attention,
    )


def _choose_attention(model: PreTrainedModel, *, spec: RunSpec, world: World) -> Choice:
    """Have the decoder compute attention with the kernel that runs on every rank."""
    choice = kernels.choose_with_others(
        spec.placement.layout,
        model_family=family_name(model),
        sizes=torch_side(family_name(model)).sizes_of(model.config),
        is_packed=spec.identity.schedule.mode == "pack",
        device=world.device,
        gather=partial(mesh.gather_numbers, world=world),
    )
    kernels.use(model, kernel=choice.kernel)
    if world.is_first:
        _LOG.info("attention: %s", choice)
    return choice


def _features(
    model: nn.Module, *, spec: RunSpec, manifest: Manifest, world: World
) -> Features | None:
    """Have the frozen tower compute what is not kept yet, and the model take that instead."""
    placement = spec.placement
    if placement.vision_features is None:
        return None
    info = read_processor_info(Path(placement.processor))
    features = Features(
        folder=Path(placement.vision_features),
        vision_sha256=sha256_json([vision_sha256(model), info.sha256]),
        width=feature_width(model),
    )
    fill(
        features,
        model=model,
        processor=Path(placement.processor),
        shards=placement.shards,
        manifest=manifest,
        world=world,
    )
    take_features(model)
    return features


def make_loader(spec: RunSpec, *, parts: Parts, state: LoaderState, world: World) -> Loader:
    """Make the loader of this rank's batches, from a state on."""
    return Loader(
        shards=spec.placement.shards,
        manifest=parts.manifest,
        processor=Path(spec.placement.processor),
        schedule=parts.schedule,
        split="train",
        rank=world.rank,
        world_size=world.size,
        micro_batch=spec.placement.layout.micro_batch,
        num_workers=spec.placement.num_workers,
        state=state,
        image_cache=Path(spec.placement.image_cache) if spec.placement.image_cache else None,
        image_cache_bytes=spec.placement.image_cache_bytes,
        features=parts.features,
        multiples=_multiples(spec),
    )


def make_heldout(spec: RunSpec, *, parts: Parts, world: World) -> list[MicroBatch]:
    """Make this rank's share of the held-out batches."""
    return heldout_batches(
        Batcher(
            shards=spec.placement.shards,
            manifest=parts.manifest,
            processor=Path(spec.placement.processor),
            split="heldout",
            features=parts.features,
            multiples=_multiples(spec),
        ),
        costs=Path(spec.placement.sample_costs),
        max_samples=spec.placement.heldout_max_samples,
        micro_batch=spec.placement.layout.micro_batch,
        rank=world.rank,
        world_size=world.size,
    )


def _multiples(spec: RunSpec) -> Multiples:
    memory = spec.placement.layout.memory
    return Multiples(tokens=memory.token_multiple, patches=memory.patch_multiple)
