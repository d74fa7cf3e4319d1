"""A Ray cluster of two nodes on this machine; it ends with the process that holds its input."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from diptych.core.ray import local_variables, ray_folder

_START_S = 60
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = pytest.mark.skip(reason="Ray is not installed: pip install 'diptych[ray]'")
    for item in items:
        if item.get_closest_marker("ray") and find_spec("ray") is None:
            item.add_marker(absent)


@pytest.fixture(scope="session")
def ray_variables() -> Iterator[None]:
    """Have this process and its children find servers on loopback, and know their token."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in local_variables().items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def two_nodes(ray_variables: None) -> Iterator[str]:
    """The address of a cluster of two nodes with a core each, which know of no sources."""
    with ray_folder() as folder:
        cluster = subprocess.Popen(
            [sys.executable, "-m", "tests.ray.two_nodes", str(folder)],
            cwd=_HERE.parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            text=True,
        )
        try:
            assert cluster.stdout is not None
            address = cluster.stdout.readline().strip()
            assert address, "the cluster did not start"
            yield address
        finally:
            assert cluster.stdin is not None
            cluster.stdin.close()
            cluster.wait(_START_S)
            cluster.stdout.close()
