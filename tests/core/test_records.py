from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from diptych.core.records import Layout, Manifest, MemoryOptions, ModelSpec, ScheduleSpec, Shard
from diptych.core.records.layout import ALLOCATOR_KEYS


def _shard(**changes):
    facts = {
        "path": "train/a-000000.tar",
        "index_path": "train/a-000000.parquet",
        "split": "train",
        "source": "a",
        "num_samples": 3,
        "num_images": 3,
        "num_bytes": 10,
        "sha256": "0" * 64,
        "index_sha256": "1" * 64,
    }
    return Shard(**{**facts, **changes})


def test_the_manifest_is_named_by_its_content():
    facts = {"quarantined": {"a": {"too_small": 2}, "b": {"too_small": 1, "no_answer": 4}}}
    one = Manifest(shards=(_shard(),), **facts)
    same = Manifest.model_validate_json(one.model_dump_json())
    other = Manifest(shards=(_shard(sha256="2" * 64),), **facts)
    assert one.sha256 == same.sha256 != other.sha256
    assert (one.num_samples("train"), one.num_samples("heldout")) == (3, 0)
    assert one.num_quarantined == 7
    assert one.quarantined_by_reason == {"no_answer": 4, "too_small": 3}


def test_no_sizes_are_none():
    """A recipe is merged into the base's sizes, and takes them away by null."""
    assert ModelSpec.model_validate({"weights": "a", "sizes": None}) == ModelSpec(weights="a")


def test_records_refuse_unknown_keys_and_changes():
    with pytest.raises(ValidationError, match="Extra inputs"):
        ScheduleSpec(globl_batch=3)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="frozen"):
        ScheduleSpec().seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "setting",
    [
        {"revision": "main"},
        {"weights_sha256": "0" * 64},
        {"allow_missing": ["a"]},
        {"allow_extra": ["a"]},
        {"resize_embeddings": True},
    ],
)
def test_settings_of_weights_need_weights(setting):
    with pytest.raises(ValidationError, match=rf"'{next(iter(setting))}' is set and there are no"):
        ModelSpec(**setting)
    assert ModelSpec(weights="someone/vlm", **setting).weights == "someone/vlm"


def test_sizes_of_one_tower_are_taken_away_by_null():
    sizes = {"text": None, "model": {"vision_feature_layer": -1}}
    assert ModelSpec.model_validate({"sizes": sizes}).sizes == {"model": sizes["model"]}


def test_a_recipe_with_weights_sets_the_sizes_of_the_base_to_null():
    assert ModelSpec.model_validate({"weights": "a/b", "sizes": None}).sizes == {}


def test_world_size_is_the_product_of_the_axes():
    assert Layout(dp=2, shard=3, tp=2, pp=2, cp=1).world_size == 24


_UNKNOWN_TO_TORCH = """
import sys
import torch

def is_known(key):
    for value in ("True", "0.5", "64", "native"):
        try:
            torch._C._accelerator_setAllocatorSettings(f"{key}:{value}")
            return True
        except (ValueError, RuntimeError) as error:
            if "Unrecognized key" in str(error):
                return False
    return False

print(*(key for key in sys.argv[1:] if not is_known(key)))
"""


def test_torch_knows_every_key_of_the_allocator():
    # In a process of its own, as the settings stay.
    command = [sys.executable, "-c", _UNKNOWN_TO_TORCH, "expandable_segment", *ALLOCATOR_KEYS]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["expandable_segment"]


def test_the_allocator_s_settings_are_a_list_of_keys_and_values():
    settings = "expandable_segments:True,roundup_power2_divisions:[256:1,>:8],max_split_size_mb:512"
    assert MemoryOptions(allocator=settings).allocator == settings
    with pytest.raises(ValidationError, match="Did you mean 'expandable_segments'"):
        MemoryOptions(allocator="max_split_size_mb:512,expandable_segment:True")
    for wrong in ("True", "", "expandable_segments:", "max_split_size_mb:1,,", "backend: native"):
        with pytest.raises(ValidationError, match=r"is no key:value as in expandable"):
            MemoryOptions(allocator=wrong)
