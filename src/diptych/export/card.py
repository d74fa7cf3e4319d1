"""Write a release's model card: what it is, how to load it, what it was trained on and how.

In: the run, its run_spec and the manifest. Out: Markdown with an empty score section, which the
scorer fills. Knows nothing of weights.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import jinja2

from diptych.core.records import Manifest, OptimizerKind, Run, RunSpec
from diptych.core.release import ADAPTER_FOLDER, NOT_SCORED, SCORES_BEGIN, SCORES_END
from diptych.core.units import format_count, format_seconds
from diptych.model.revision import Source, tower_sources

DTYPES = {"fp32": "32-bit floats", "bf16": "rounded to bfloat16 from the trained 32-bit weights"}

ALGORITHMS: dict[OptimizerKind, str] = {
    "adamw": "AdamW",
    "adamw_8bit": "AdamW with moments of 8 bits",
    "muon": "Muon for the matrices of blocks, AdamW for the rest",
}


def render(
    *, run: Run, spec: RunSpec, manifest: Manifest, weights: str, dtype: str, release: Path
) -> str:
    """Render the card of a release whose weights already lie in `release`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("diptych.export"),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # Markdown, not HTML
        keep_trailing_newline=True,
    )
    return environment.get_template("card.md.jinja").render(
        run=run,
        spec=spec,
        manifest=manifest,
        optimizer=spec.identity.optimizer,
        layout=spec.placement.layout,
        sources=_sources(manifest),
        base_models=_base_models(spec),
        began_with="; ".join(_which(source) for source in _began_with(spec)),
        is_mean=weights == "ema",
        adapters=_adapters(spec),
        adapter_folder=ADAPTER_FOLDER if (release / ADAPTER_FOLDER).is_dir() else None,
        algorithm=ALGORITHMS[spec.identity.optimizer.kind],
        course=_course(spec),
        dtype=DTYPES[dtype],
        num_parameters=format_count(count_parameters(release)),
        train_time=format_seconds(run.train_s),
        scores_begin=SCORES_BEGIN,
        scores_end=SCORES_END,
        not_scored=NOT_SCORED,
    )


def count_parameters(release: Path) -> int:
    """Count the elements of all weights, from the safetensors files' headers alone."""
    total = 0
    for path in sorted(release.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(size))
        tensors = (entry for name, entry in header.items() if name != "__metadata__")
        total += sum(math.prod(entry["shape"]) for entry in tensors)
    return total


def _sources(manifest: Manifest) -> list[dict[str, Any]]:
    samples: dict[tuple[str, str], int] = defaultdict(int)
    images: dict[tuple[str, str], int] = defaultdict(int)
    for shard in manifest.shards:
        samples[shard.source, shard.split] += shard.num_samples
        images[shard.source, shard.split] += shard.num_images
    return [
        {
            "source": source,
            "split": split,
            "num_samples": number,
            "num_images": images[source, split],
        }
        for (source, split), number in sorted(samples.items())
    ]


def _course(spec: RunSpec) -> str:
    """Say how the learning rate goes on after the warm-up."""
    optimizer = spec.identity.optimizer
    if optimizer.lr_schedule == "constant":
        return "then constant"
    end = f"to {optimizer.final_lr_fraction} of it"
    if optimizer.lr_schedule == "wsd":
        return f"then constant, and over the last {optimizer.decay_steps} steps a line {end}"
    return f"then a {'cosine' if optimizer.lr_schedule == 'cosine' else 'line'} {end}"


def _adapters(spec: RunSpec) -> str | None:
    """Say which adapters were trained."""
    lora = spec.identity.model.lora
    if lora is None:
        return None
    kind = "DoRA" if lora.dora else "LoRA"
    where = ", ".join(lora.towers) + (f" ({', '.join(lora.targets)})" if lora.targets else "")
    return f"{kind} of rank {lora.rank}, alpha {lora.alpha:g}, dropout {lora.dropout:g}: {where}"


def _base_models(spec: RunSpec) -> str | None:
    """Name the weights that training started from as YAML: a list where there are several."""
    names = [_name(source) for source in _began_with(spec)]
    return f"[{', '.join(names)}]" if len(names) > 1 else "".join(names) or None


def _began_with(spec: RunSpec) -> list[Source]:
    model = spec.identity.model
    whole: list[Source] = [] if model.weights is None else [model]
    return [*whole, *tower_sources(model).values()]


def _which(source: Source) -> str:
    """Say which weights those were: the name, the hub's commit, and the digest."""
    parts = [_name(source)]
    if source.revision is not None:
        parts.append(f"revision `{source.revision}`")
    if source.weights_sha256 is not None:
        parts.append(f"digest `{source.weights_sha256}`")
    return ", ".join(parts)


def _name(source: Source) -> str:
    """Return a hub id; of a local folder only its last name."""
    weights = source.weights or ""
    return Path(weights).name if Path(weights).exists() else weights
