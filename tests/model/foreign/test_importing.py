"""A checkpoint of another trainer becomes weights to begin with, read by a process of its own."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import textwrap
from collections import OrderedDict

import pytest
import torch
from click.testing import CliRunner

from diptych.core.errors import ConfigError, FormatError, RunError
from diptych.core.records import ModelSpec
from diptych.core.sandbox import _environment
from diptych.model.foreign import importing
from diptych.model.foreign.importing import Limits, import_weights
from tests.model.foreign.writers import tiny, write_config


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a state dict in bf16, under a wrapper, and its config."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_config(folder)
    weights = {
        f"module.{name}": each.bfloat16() for name, each in tiny(seed=3).state_dict().items()
    }
    torch.save({"model": weights, "optimizer": {"lr": torch.zeros(1)}}, folder / "last.pt")
    return folder


def test_the_command_makes_weights_to_train_from(checkpoint, tmp_path, monkeypatch):
    """Values are the checkpoint's, bit for bit; the child knows no secret."""
    from diptych.cli import cli
    from diptych.model import weights

    monkeypatch.setenv("HF_TOKEN", "s3cret")
    out = tmp_path / "made" / "weights"
    done = CliRunner().invoke(cli, ["import-weights", str(checkpoint), str(out)])
    assert done.exit_code == 0, done.output
    assert f"{len(tiny().state_dict())} tensors (bfloat16)" in done.output
    assert "of names that began with model.module." in done.output
    assert "1 that are not the model's were left out" in done.output
    assert "s3cret" not in done.output
    assert sorted(path.name for path in out.parent.iterdir()) == ["weights"]
    spec = ModelSpec(family="qwen3_vl", weights=str(out))
    model = weights.load(spec, config=weights.read_config(spec), attention={"": "sdpa"}, seed=0)
    expected = tiny(seed=3).state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name].bfloat16().float()), name
    assert json.loads((out / "config.json").read_text()) == json.loads(
        (checkpoint / "config.json").read_text()
    )
    with pytest.raises(ConfigError, match="is there already"):
        import_weights(checkpoint, out=out)


def test_weights_that_are_not_finite_are_refused(checkpoint, tmp_path):
    weights = {name: each.bfloat16() for name, each in tiny().state_dict().items()}
    weights["lm_head.weight"] = weights["lm_head.weight"].clone()
    weights["lm_head.weight"][0, 0] = float("nan")
    torch.save(weights, checkpoint / "last.pt")
    with pytest.raises(FormatError, match=r"1 tensors .* not finite, such as lm_head.weight"):
        import_weights(checkpoint, out=tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


class Canary:
    """A pickle that leaves a file when it is read."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.system, (f"touch {self._path}",)


def test_a_poisoned_checkpoint_is_refused_and_nothing_is_left(checkpoint, tmp_path):
    canary = tmp_path / "canary"
    torch.save(OrderedDict(weight=Canary(canary)), checkpoint / "last.pt")
    with pytest.raises(FormatError, match=r"'last.pt' asks for posix.system when it is read"):
        import_weights(checkpoint, out=tmp_path / "out")
    assert not canary.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_a_poisoned_config_is_refused_before_anything_is_read(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(importing, "run_confined", lambda *_, **__: pytest.fail("it was read"))
    config = json.loads((checkpoint / "config.json").read_text())
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.Model"}}))
    with pytest.raises(ConfigError, match="code that comes with the weights"):
        import_weights(checkpoint, out=tmp_path / "out")
    path.unlink()
    with pytest.raises(ConfigError, match=r"no config.json in .*--config"):
        import_weights(checkpoint, out=tmp_path / "out")
    with pytest.raises(ConfigError, match="There is no checkpoint"):
        import_weights(tmp_path / "none", out=tmp_path / "out")


def test_a_process_without_enough_memory_ends(checkpoint, tmp_path):
    with pytest.raises(RunError, match=r"needs more memory than it may take.*Raise --memory-gib"):
        import_weights(checkpoint, out=tmp_path / "out", limits=Limits(memory_gib=0.05))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "left", [{}, {"confined": {"held": [], "open": []}}, {"error": "x"}], ids=str
)
def test_a_process_that_says_nonsense_is_not_believed(left, tmp_path):
    path = tmp_path / "result.json"
    with pytest.raises(FormatError, match="has left no result"):
        importing._read_result(path)
    path.write_text(json.dumps(left))
    with pytest.raises(FormatError, match="has left no result"):
        importing._read_result(path)


def test_links_and_other_files_are_not_taken_over(tmp_path):
    (tmp_path / "model.safetensors").symlink_to("/etc/passwd")
    with pytest.raises(FormatError, match=r"has left 'model\.safetensors'"):
        importing._check_weights(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(FormatError, match="has left 'link'"):
        importing._check_weights(tmp_path / "link")
    (tmp_path / "link").unlink()
    (tmp_path / "pickle.bin").write_bytes(b"")
    with pytest.raises(FormatError, match=r"has left 'pickle\.bin'"):
        importing._check_weights(tmp_path)


TRIES = """
    import json, os, socket, sys
    from pathlib import Path
    from diptych.core.sandbox import confine

    folder = Path(sys.argv[1])
    confined = confine(folder, memory_bytes=2 * 2**30, cpu_s=60)
    found = {"held": confined.held, "open": confined.open, "names": sorted(os.environ)}

    def fails(name, act):
        try:
            act()
            found[name] = False
        except (OSError, MemoryError) as error:
            found[name] = type(error).__name__

    fails("outside", lambda: (folder.parent / "outside").write_text("x"))
    fails("moved", lambda: (folder / "sandbox.py").rename(folder.parent / "moved"))
    fails("program", lambda: os.execv("/bin/true", ["true"]))
    fails("memory", lambda: bytearray(3 * 2**30))

    def connect():
        with socket.create_connection(("127.0.0.1", int(sys.argv[2])), timeout=5):
            pass

    fails("network", connect)
    (folder / "own").write_text(json.dumps(found))
"""


def test_the_sandbox_holds_what_it_says(tmp_path, monkeypatch):
    """Every right that it says it has given up is tried; what it could not give up is not."""
    folder = tmp_path / "box"
    folder.mkdir()
    (folder / "sandbox.py").write_text(textwrap.dedent(TRIES))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        subprocess.run(
            [sys.executable, "-P", folder / "sandbox.py", folder, port],
            env=_environment(folder),
            check=True,
        )
    found = json.loads((folder / "own").read_text())
    assert set(found["names"]) - {"LC_CTYPE"} == {
        "CUDA_VISIBLE_DEVICES",
        "HF_HUB_OFFLINE",
        "HOME",
        "OMP_NUM_THREADS",
        "PATH",
        "PYTHONPATH",
        "TMPDIR",
        "TOKENIZERS_PARALLELISM",
        "TRANSFORMERS_OFFLINE",
    }
    assert found["memory"] == "MemoryError"
    # What this kernel has, asked of it here.
    version = ctypes.CDLL(None).syscall(444, None, 0, 1)
    left = " ".join(found["open"])
    assert ("may write" in left) == (version <= 0)
    if version > 0:
        assert found["outside"] == found["moved"] == found["program"] == "PermissionError"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["box"]
    assert "network" not in left or version < 4
    if "network" not in left:
        assert found["network"] in ("PermissionError", "OSError", "ConnectionRefusedError")
