"""What an attempt notes of the one before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diptych.launch.attempts import open_attempt, stop_attempt
from diptych.launch.ready import open_folder
from diptych.monitor.run_folder import RunFolder
from tests.monitor.specs import make_spec


def _former(folder: RunFolder) -> dict[str, Any]:
    noted = folder.read_attempts()[-1]["former"]
    return {name: noted[name] for name in ("state", "by", "step") if name in noted}


def test_an_attempt_notes_how_the_one_before_ended(tmp_path: Path) -> None:
    folder, spec = RunFolder(tmp_path), make_spec()
    open_folder(spec, folder=folder)
    open_attempt(folder, spec=spec, step=0, facts={})
    assert _former(folder) == {}
    folder.stop.touch()
    stop_attempt(folder, spec=spec, step=7)
    open_folder(spec, folder=folder)
    open_attempt(folder, spec=spec, step=7, facts={})
    assert _former(folder) == {"state": "stopped", "by": "request", "step": 7}
    # Ranks that are started again by torch elastic: the killed ones have said nothing.
    open_attempt(folder, spec=spec, step=9, facts={})
    assert _former(folder) == {"state": "running", "step": 7}
