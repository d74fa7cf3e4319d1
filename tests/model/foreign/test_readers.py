"""Checkpoints of other trainers give back the weights that they were written from, bit for bit."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections import OrderedDict

import pytest
import torch

from diptych.core.errors import ConfigError, DataError, FormatError
from diptych.model.foreign.convert import read_checkpoint
from diptych.model.foreign.fitting import fit
from tests.model.foreign.writers import (
    tiny,
    write_deepspeed,
    write_distributed,
    write_fsdp1,
)


class Canary:
    """A pickle that leaves a file when it is read."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.system, (f"touch {self._path}",)


@pytest.fixture(scope="module")
def config():
    return tiny().config


def _give_back(path, *, config):
    found = read_checkpoint(path)
    return found.form, {
        name: each.read() for name, each in fit(found.tensors, config=config).tensors.items()
    }


def _assert_equal(found, expected):
    assert found.keys() >= expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("stage", "dtype", "frozen"),
    [
        pytest.param(2, "bf16", False, id="zero 2 in bf16"),
        pytest.param(3, "fp32", True, id="zero 3, a tower frozen"),
        pytest.param(0, "fp32", False, id="without zero", marks=pytest.mark.slow),
        pytest.param(1, "fp32", True, id="zero 1, a tower frozen", marks=pytest.mark.slow),
        pytest.param(1, "bf16", False, id="zero 1 in bf16", marks=pytest.mark.slow),
        pytest.param(3, "bf16", False, id="zero 3 in bf16", marks=pytest.mark.slow),
    ],
)
def test_deepspeed(stage, dtype, frozen, ranks, tmp_path, config):
    expected = ranks(2).run(
        write_deepspeed, folder=tmp_path, stage=stage, dtype=dtype, frozen=frozen
    )[0]
    form, found = _give_back(tmp_path, config=config)
    assert form == f"DeepSpeed's, {f'ZeRO {stage} on 2 ranks' if stage else 'without ZeRO'}"
    _assert_equal(found, expected)
    assert torch.equal(found["lm_head.weight"], found["model.language_model.embed_tokens.weight"])
    # What the optimizer has moved is not what the model was made with.
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(found[name].float(), tiny().state_dict()[name])


def test_deepspeed_without_a_rank_s_part_is_refused(ranks, tmp_path, config):
    ranks(2).run(write_deepspeed, folder=tmp_path, stage=2)
    next((tmp_path / "global_step1").glob("*rank_1_*optim_states.pt")).unlink()
    with pytest.raises(FormatError, match="written by 2 ranks, and has the parts of 1 optimizers"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "below",
    ["model", *(pytest.param(below, marks=pytest.mark.slow) for below in ("", "app"))],
)
def test_distributed(below, ranks, tmp_path, config):
    folder = tmp_path / "pytorch_model_fsdp_0"
    expected = ranks(2).run(write_distributed, folder=folder, below=below)[0]
    form, found = _give_back(tmp_path, config=config)
    assert form.startswith("torch's distributed checkpoint, 2 files")
    _assert_equal(found, expected)
    for file in folder.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(FormatError, match=r"distcp' cannot be read"):
        _give_back(folder, config=config)


def test_fsdp_of_the_first_version(ranks, tmp_path, config):
    expected = ranks(2).run(write_fsdp1, folder=tmp_path)[0]
    _assert_equal(_give_back(tmp_path / "sharded", config=config)[1], expected)
    form, found = _give_back(tmp_path / "pytorch_model.bin", config=config)
    assert form == "a state dict in 1 files"
    _assert_equal(found, expected)


def _wrap(names, *, by):
    return {by(name): tensor for name, tensor in names.items()}


@pytest.mark.parametrize(
    "by",
    [
        lambda name: f"module.{name}",
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: name.replace("layers.0.", "layers.0._fsdp_wrapped_module.").replace(
            "blocks.1.", "blocks.1._checkpoint_wrapped_module._orig_mod."
        ),
        lambda name: f"model.{name}",
        lambda name: f"state_dict.model.module.{name}",
    ],
    ids=["module", "compiled", "both", "within", "model", "deep"],
)
def test_wrappers_of_names_are_taken_off(by, tmp_path, config):
    expected = dict(tiny(seed=3).state_dict())
    torch.save({**_wrap(expected, by=by), "epoch": 3}, tmp_path / "model.pt")
    found = read_checkpoint(tmp_path / "model.pt")
    fitted = fit(found.tensors, config=config)
    values = {name: each.read() for name, each in fitted.tensors.items()}
    _assert_equal(values, expected)


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_folder_of_transformers_trainer(in_parts, tmp_path, config):
    """What lies beside the weights is not opened; its classes would be refused."""
    expected = dict(tiny(seed=3).state_dict())
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        (tmp_path / name).write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    if in_parts:
        names = sorted(expected)
        parts = {"a.bin": names[:20], "b.bin": names[20:]}
        for file, own in parts.items():
            torch.save({name: expected[name] for name in own}, tmp_path / file)
        weight_map = {name: file for file, own in parts.items() for name in own}
        index = tmp_path / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    else:
        torch.save(expected, tmp_path / "pytorch_model.bin")
    _assert_equal(_give_back(tmp_path, config=config)[1], expected)
    assert not (tmp_path / "canary").exists()
    if in_parts:
        (tmp_path / "b.bin").unlink()
        with pytest.raises(FormatError, match=r"'b.bin' cannot be read: FileNotFoundError"):
            read_checkpoint(tmp_path)
        index.write_text(json.dumps({"weight_map": {"x": "../b.bin"}}))
        with pytest.raises(DataError, match="leaves the folder"):
            read_checkpoint(tmp_path)


def test_tensors_that_are_not_the_model_s_are_listed(tmp_path, config):
    weights = dict(tiny().state_dict())
    extra = {"reward.weight": torch.zeros(3), "optimizer.exp_avg": torch.zeros(3)}
    torch.save({"model": weights, **extra}, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match=r"1 tensors are not the model's: reward.weight\. "):
        fit(read_checkpoint(tmp_path / "a.pt").tensors, config=config)
    name = "model.visual.patch_embed.proj.bias"
    torch.save({key: each for key, each in weights.items() if key != name}, tmp_path / "b.pt")
    with pytest.raises(ConfigError, match=f"1 missing: {name}"):
        fit(read_checkpoint(tmp_path / "b.pt").tensors, config=config)
    torch.save({**weights, name: torch.zeros(5)}, tmp_path / "c.pt")
    with pytest.raises(ConfigError, match=rf"{name} is \[5\], the model's is \[32\]"):
        fit(read_checkpoint(tmp_path / "c.pt").tensors, config=config)
    torch.save({"_flat_param": torch.zeros(9)}, tmp_path / "d.pt")
    with pytest.raises(ConfigError, match="FSDP1's flattened weights"):
        fit(read_checkpoint(tmp_path / "d.pt").tensors, config=config)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", [".metadata", "mp_rank_00_model_states.pt", "model.bin"])
def test_a_pickle_that_runs_code_is_not_run(name, protocol, tmp_path):
    canary = tmp_path / "canary"
    poison = OrderedDict(module={"weight": torch.zeros(2), "bias": Canary(canary)})
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    if name == ".metadata":
        (folder / name).write_bytes(pickle.dumps(Canary(canary), protocol=protocol))
    else:
        torch.save(poison, folder / name, pickle_protocol=protocol)
    with pytest.raises(FormatError) as caught:
        read_checkpoint(folder)
    assert f"'{name}'" in str(caught.value)
    assert "posix.system" in str(caught.value)
    assert not canary.exists()
    # Read as pickles are read, it does run.
    pickle.loads(pickle.dumps(Canary(canary)))
    assert canary.exists()


def test_a_part_that_runs_code_is_not_run(ranks, tmp_path, config):
    """In a file of tensors, behind metadata that are in order; and metadata that lead elsewhere."""
    ranks(2).run(write_distributed, folder=tmp_path / "good")
    canary = tmp_path / "canary"
    poison = pickle.dumps(Canary(canary), protocol=2)
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    for file in (tmp_path / "bad").glob("*.distcp"):
        size = file.stat().st_size
        file.write_bytes((poison * (size // len(poison) + 1))[:size])
    with pytest.raises(FormatError, match=r"distcp'"):
        _give_back(tmp_path / "bad", config=config)
    assert not canary.exists()
    metadata = (tmp_path / "good" / ".metadata").read_bytes()
    name = b"__0_0.distcp"
    away = b"../0_0.distc"
    assert name in metadata
    (tmp_path / "good" / ".metadata").write_bytes(metadata.replace(name, away))
    with pytest.raises(DataError, match="leaves the folder"):
        _give_back(tmp_path / "good", config=config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mp_rank_01_model_states.pt", "cut by tensor, pipeline or expert parallelism"),
        ("layer_03-model_states.pt", "cut by tensor, pipeline or expert parallelism"),
        ("notes.txt", r"no checkpoint that can be read; in it are notes.txt"),
        ("model.safetensors", "name it in plan.model.weights as it is"),
    ],
)
def test_what_is_not_built_is_refused(name, message, tmp_path):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises((ConfigError, FormatError), match=message):
        read_checkpoint(tmp_path)


def test_a_path_in_latest_leads_nowhere(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(b"")
    (folder / "latest").write_text("..")
    with pytest.raises(ConfigError, match="no checkpoint that can be read"):
        read_checkpoint(folder)
