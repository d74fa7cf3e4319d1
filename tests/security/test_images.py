"""Images: headers that promise too much, chunks that unpack to too much, and damage of any kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from diptych.data.reasons import REASONS
from tests.security import bombs, fuzz
from tests.security.canary import Canary

MAX_GROWTH_BYTES = 64 << 20
NUM_ROUNDS = 60


@pytest.fixture(scope="module")
def read() -> dict[str, dict[str, Any]]:
    """Read all bombs in one process of its own, as memory that was used before hides growth."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.security.bombs"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", bombs.PROMISING)
def test_a_header_that_promises_65535_squared(
    canary: Canary, read: dict[str, dict[str, Any]], name: str
) -> None:
    canary.shows(read[name]["careless"] > MAX_GROWTH_BYTES)
    assert read[name]["ours"] < MAX_GROWTH_BYTES
    assert read[name]["end"] == "too_many_pixels"


@pytest.mark.parametrize("name", bombs.COMPRESSED)
def test_a_png_that_unpacks_to_far_more_than_it_is(
    canary: Canary, read: dict[str, dict[str, Any]], name: str
) -> None:
    canary.shows(read[name]["careless"] > MAX_GROWTH_BYTES)
    assert read[name]["ours"] < MAX_GROWTH_BYTES / 2
    assert read[name]["end"] == ("pixels" if name == "png pixels" else "unreadable_image")


def test_damaged_images_of_every_format(canary: Canary) -> None:
    """In a process of its own, which may die of them; `docs/security.md` has a longer run."""

    def careless(data: bytes) -> None:
        if data[:2] == b"\xff\xd8":
            raise KeyError("a fault that nobody expects")

    canary.shows(len(fuzz.run(num_rounds=3, read=careless).faults) > 3)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.security.fuzz", f"--rounds={NUM_ROUNDS}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["num_inputs"] == NUM_ROUNDS * len(fuzz.formats())
    assert set(found["ends"]) <= {*REASONS, "pixels"}
    assert {"pixels", "truncated_image", "unreadable_image"} <= set(found["ends"])
    assert found["grown_bytes"] < MAX_GROWTH_BYTES
