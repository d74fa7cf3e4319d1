"""A package of Flash Attention is told by its distribution, and tried where that is asked for."""

from __future__ import annotations

import importlib
from importlib import metadata

import pytest

from diptych.core.packages import missing_kernels

NAMES = {"flash_2": "flash-attn", "flash_3": "flash-attn-3", "flash_4": "flash-attn-4"}


@pytest.fixture
def install(monkeypatch):
    """Have just these distributions be installed."""

    def set_up(*distributions):
        def version(name):
            if name not in distributions:
                raise metadata.PackageNotFoundError(name)
            return "1"

        monkeypatch.setattr(metadata, "version", version)

    return set_up


def test_nothing_is_installed(install):
    install()
    found = missing_kernels(tries_import=False)
    assert found == {kernel: f"{name} is not installed" for kernel, name in NAMES.items()}


def test_version_4_is_not_version_2_though_they_share_a_module(install):
    install("flash-attn-4")
    assert set(missing_kernels(tries_import=False)) == {"flash_2", "flash_3"}


def test_a_package_built_for_another_torch_is_named_with_its_error(install, monkeypatch):
    install(*NAMES.values())

    def load(module):
        if module == "flash_attn_interface":
            raise ImportError("undefined symbol: _ZN3c10\nand more")

    monkeypatch.setattr(importlib, "import_module", load)
    assert missing_kernels(tries_import=False) == {}
    assert missing_kernels(tries_import=True) == {
        "flash_3": "flash-attn-3 cannot be imported: undefined symbol: _ZN3c10"
    }
