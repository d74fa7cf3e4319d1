"""What this machine lacks is said before a rank starts."""

from __future__ import annotations

import ctypes.util
import importlib.util
import shutil
from collections import namedtuple
from importlib import metadata

import pytest

from diptych.core.errors import LayoutError
from diptych.core.records import Layout
from diptych.launch.preflight import check_machine

CPU_OFFLOAD = {"engine": "zero", "zero": {"optimizer": {"to": "cpu"}}}


def _layout(fields):
    return Layout.model_validate(fields)


def _nvme(path):
    return _layout(
        {"engine": "zero", "zero": {"stage": 3, "optimizer": {"to": "nvme", "path": str(path)}}}
    )


def test_a_plain_layout_needs_nothing(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    check_machine(Layout(), num_parameters=10)
    check_machine(_layout({"engine": "zero"}), num_parameters=10)


@pytest.mark.parametrize(
    ("fields", "package"),
    [
        ({"engine": "zero"}, "deepspeed"),
        ({"mixed_precision": {"fp8": ["language"]}}, "torchao"),
        ({"memory": {"loss": "fused"}}, "liger_kernel"),
    ],
)
def test_a_missing_package_is_named(fields, package, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    with pytest.raises(LayoutError, match=f"needs {package}, which is not installed.*pip install"):
        check_machine(_layout(fields), num_parameters=10)


def test_moments_of_eight_bits_need_a_package_and_a_compiler(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LayoutError, match=r"kind adamw_8bit needs torchao.*diptych\[fp8\]"):
        check_machine(Layout(), num_parameters=10, optimizer="adamw_8bit")
    check_machine(Layout(), num_parameters=10, optimizer="muon")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(LayoutError, match=r"kind adamw_8bit needs a C\+\+ compiler.*kind to adamw"):
        check_machine(Layout(), num_parameters=10, optimizer="adamw_8bit")


@pytest.mark.parametrize(
    ("kernel", "package"),
    [("flash_2", "flash-attn"), ("flash_3", "flash-attn-3"), ("flash_4", "flash-attn-4")],
)
def test_a_kernel_without_its_package_is_named(kernel, package, monkeypatch):
    def version(name):
        if name == package:
            raise metadata.PackageNotFoundError(name)
        return "9"

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(LayoutError, match=f"is {kernel}, and {package} is not installed.*auto"):
        check_machine(_layout({"attention": kernel}), num_parameters=10)
    for other in {"auto", "sdpa", "flex", "flash_2", "flash_3", "flash_4"} - {kernel}:
        check_machine(_layout({"attention": other}), num_parameters=10)


@pytest.mark.parametrize(
    ("fields", "cure"),
    [
        (CPU_OFFLOAD, "adam to torch"),
        ({"compile": {"blocks": ["language"]}}, r"compile.blocks to \[\]"),
    ],
)
def test_a_missing_compiler_is_named(fields, cure, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(LayoutError, match=cure):
        check_machine(_layout(fields), num_parameters=10)


def test_offload_with_torch_s_adam_needs_no_compiler(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    fields = {"engine": "zero", "zero": {"optimizer": {"to": "cpu", "adam": "torch"}}}
    check_machine(_layout(fields), num_parameters=10)


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: f"lib{name}.so.1")


def test_a_folder_on_nvme_must_be_there(tmp_path, tools):
    with pytest.raises(LayoutError, match="does not exist"):
        check_machine(_nvme(tmp_path / "absent"), num_parameters=10)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(LayoutError, match="is no folder"):
        check_machine(_nvme(file), num_parameters=10)
    check_machine(_nvme(tmp_path), num_parameters=10)


def test_its_disk_must_have_room(tmp_path, tools, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2000, 0, 1599))
    # Sixteen bytes a parameter: an fp32 weight, its gradient and two moments.
    with pytest.raises(LayoutError, match=r"take 1.6 KiB, and .* has 1.6 KiB free"):
        check_machine(_nvme(tmp_path), num_parameters=100)
    check_machine(_nvme(tmp_path), num_parameters=99)
    check_machine(_nvme(tmp_path), num_parameters=None)


def test_libaio_must_be_there(tmp_path, tools, monkeypatch):
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    with pytest.raises(LayoutError, match="libaio"):
        check_machine(_nvme(tmp_path), num_parameters=10)
