"""The canary that every test of a threat needs: a test that shows none singing fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.canary import Canary


@pytest.fixture(autouse=True)
def canary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Canary]:
    """A canary that must be shown to sing, and be silent in the end.

    Traces lie in a folder of their own, so that no test finds them in what it searches.
    """
    canary = Canary(Path(tmp_path_factory.mktemp("canary")))
    yield canary
    canary.close()
    assert canary.num_proofs, "no proof that the payload leaves a trace: the test shows nothing"
    assert not canary.traces(), f"the canary sang: {canary.traces()}"
