"""Run a release as its users would: transformers, the folder, and nothing else that we built.

In: a folder of samples and a release. Out: `outputs.safetensors` and `loading.json` in the samples'
folder. A process of its own, which never imports the code that built or trained the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from diptych.core.children import follow_parent
from diptych.core.release import ADAPTER_FOLDER
from diptych.data.chat import to_chat
from diptych.data.images.decode import decode
from diptych.export.samples import (
    Output,
    ParitySample,
    positions,
    read_samples,
    write_outputs,
)

OUTPUTS = "outputs.safetensors"
LOADING = "loading.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Load the release, compute logits for the samples, and write both down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", type=Path, required=True)
    parser.add_argument("--samples", type=Path, required=True)
    options = parser.parse_args(arguments)
    follow_parent()
    processor = AutoProcessor.from_pretrained(
        options.release, local_files_only=True, trust_remote_code=False
    )
    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        options.release,
        local_files_only=True,
        trust_remote_code=False,
        dtype=torch.float32,
        output_loading_info=True,
    )
    model, loading = loaded
    if (options.release / ADAPTER_FOLDER).is_dir():
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, options.release / ADAPTER_FOLDER)
    _align(model.eval())
    outputs = [
        compute(sample, model=model, processor=processor)
        for sample in read_samples(options.samples)
    ]
    write_outputs(options.samples / OUTPUTS, outputs=outputs)
    (options.samples / LOADING).write_text(json.dumps(_names(loading)), encoding="utf-8")


def compute(sample: ParitySample, *, model: Any, processor: Any) -> Output:
    """Compute one sample's logits from its raw messages and image bytes."""
    arguments: dict[str, Any] = {}
    if sample.images:
        arguments["images"] = [Image.fromarray(decode(image)) for image in sample.images]
    inputs = processor.apply_chat_template(
        to_chat(sample.messages),
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs=arguments,
    )
    with torch.inference_mode():
        logits_SV = model(**inputs).logits[0]
    kept = positions(logits_SV.shape[0], num_classes=logits_SV.shape[1])
    pixels_PD = inputs.get("pixel_values")
    return Output(
        input_ids=inputs["input_ids"][0].numpy(),
        pixels=np.zeros((0, 0), np.float32) if pixels_PD is None else pixels_PD.float().numpy(),
        logits=logits_SV[torch.from_numpy(kept)].float().numpy(),
    )


def _align(model: torch.nn.Module) -> None:
    """Copy weights out of the mapped file: where a tensor starts decides how sums are rounded."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _names(loading: dict[str, Any]) -> dict[str, list[str]]:
    """Keep transformers' report on the weights it could not place, as sorted names."""
    return {
        kind: sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in entries)
        for kind, entries in loading.items()
        if kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }


if __name__ == "__main__":
    main()
