"""Run the checkpoint as training ran it: our model builder, our encoding, our batches.

In: a run_spec, a checkpoint and the parity samples. Out: what the trained model computes for them,
and how the checkpoint's weights compare with a release's. Knows nothing of how a release is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers.core_model_loading import revert_weight_conversion

from diptych.core.records import ModelSpec, ProcessorInfo, RunSpec
from diptych.core.release import ADAPTER_FOLDER
from diptych.data.chat import ChatTokenizer
from diptych.data.collate import Ready, collate
from diptych.data.encode import encode
from diptych.data.images.decode import decode
from diptych.data.images.patches import Patcher, TilePatcher, load_patcher
from diptych.export.adapters import WEIGHTS, Released
from diptych.export.samples import Output, ParitySample, positions
from diptych.model.assemble import build
from diptych.model.attention.kernels import seen_by
from diptych.model.families import family_name, mask_rule, torch_side

Weights = dict[str, torch.Tensor]
ADAPTER_WEIGHTS = f"{ADAPTER_FOLDER}/{WEIGHTS}"


@dataclass(frozen=True, kw_only=True)
class WeightReport:
    """How a release's weights compare with the checkpoint's, by name and bit for bit."""

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    changed: tuple[str, ...]


def compare_weights(release: Path, *, wanted: Released, info: ProcessorInfo) -> WeightReport:
    """Compare a release's tensors with the checkpoint's, rounded to the release's precision.

    transformers writes some families under the names that their first releases had.

    Args:
        release: the release's folder.
        wanted: what the checkpoint says of it.
        info: the processor's numbers.
    """
    model = build(wanted.model, tokens=info.tokens, image=info.image, seed=None, device="meta")
    weights = dict(revert_weight_conversion(model, dict(wanted.weights))) | wanted.adapter
    found: set[str] = set()
    changed: list[str] = []
    with ExitStack() as stack:
        for path in [*sorted(release.glob("*.safetensors")), *release.glob(ADAPTER_WEIGHTS)]:
            file = stack.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118 - not a mapping
                found.add(name)
                if name not in weights:
                    continue
                tensor = file.get_tensor(name)
                if not torch.equal(tensor, weights[name].to(tensor.dtype)):
                    changed.append(name)
    return WeightReport(
        missing=tuple(sorted(weights.keys() - found)),
        extra=tuple(sorted(found - weights.keys())),
        changed=tuple(sorted(changed)),
    )


def run_checkpoint(
    samples: Sequence[ParitySample],
    *,
    spec: RunSpec,
    model_spec: ModelSpec,
    info: ProcessorInfo,
    weights: Weights,
    dtype: torch.dtype,
    num_threads: int,
) -> tuple[Output, ...]:
    """Compute the trained model's logits in fp32, one sample a batch, as the loader makes it.

    Args:
        samples: the conversations.
        spec: of the run.
        model_spec: of the model that runs.
        info: the processor's numbers.
        weights: the model's, whole.
        dtype: the release's precision; the weights are rounded to it first, so that rounding,
            which was asked for, is not taken for an error.
        num_threads: intra-op threads meanwhile.
    """
    model = build(model_spec, tokens=info.tokens, image=info.image, seed=None).eval()
    rounded = {name: tensor.to(dtype).float() for name, tensor in weights.items()}
    model.load_state_dict(rounded, strict=False)
    model.tie_weights()
    processor = Path(spec.placement.processor)
    tokenizer, patcher = ChatTokenizer(processor), load_patcher(processor, image=info.image)
    former = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return tuple(
            _compute(
                sample,
                model=model,
                tokenizer=tokenizer,
                patcher=patcher,
                info=info,
            )
            for sample in samples
        )
    finally:
        torch.set_num_threads(former)


def _compute(
    sample: ParitySample,
    *,
    model: Any,
    tokenizer: ChatTokenizer,
    patcher: Patcher | TilePatcher,
    info: ProcessorInfo,
) -> Output:
    """Run one micro-batch of one row as a training step does, but for the loss.

    Without images there is no vision tower here and no dummy's token behind the row: one token
    more would round the others' logits differently.
    """
    images = [decode(image) for image in sample.images]
    row = encode(
        sample.messages,
        images_wh=[(image.shape[1], image.shape[0]) for image in images],
        tokenizer=tokenizer,
        info=info,
    )
    patches = tuple(patcher.cut(image, num_images=len(images)) for image in images)
    ready = Ready(encoded=row, patches=patches, source=0)
    batch = collate([[ready]], patcher=patcher, info=info, num_sources=1)
    num_tokens = len(row.input_ids)
    input_ids_BS = batch.input_ids_BS[:, :num_tokens]
    seen = seen_by(model, rule=mask_rule(model), input_ids_BS=input_ids_BS, segment_ids_BS=None)
    inputs = torch_side(family_name(model)).inputs(
        input_ids_BS=input_ids_BS,
        position_ids_3BS=batch.position_ids_3BS[:, :, :num_tokens],
        pixel_values_PD=batch.pixel_values_PD if images else None,
        grid_thw_I3=batch.grid_thw_I3 if images else None,
        mask_B1SS=seen.mask,
    )
    with torch.inference_mode():
        hidden_BSD = model.model(**inputs, use_cache=False).last_hidden_state
        logits_SV = model.lm_head(hidden_BSD)[0]
    kept = positions(logits_SV.shape[0], num_classes=logits_SV.shape[1])
    return Output(
        input_ids=row.input_ids,
        pixels=batch.pixel_values_PD.numpy() if images else np.zeros((0, 0), np.float32),
        logits=logits_SV[torch.from_numpy(kept)].numpy(),
    )
