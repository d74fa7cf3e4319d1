from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from diptych.core.records import Layout
from diptych.monitor.run_folder import RunFolder
from diptych.report.lineage import _as_run

if TYPE_CHECKING:
    from tests.report.conftest import Finished


def test_the_layout_is_the_one_that_ran(finished: Finished, tmp_path: Path) -> None:
    asked = finished.run_spec
    ran = asked.placement.model_copy(update={"layout": Layout(engine="fsdp2", shard=3)})
    assert ran != asked.placement
    RunFolder(tmp_path).write_spec(asked.model_copy(update={"placement": ran}))
    run = finished.run.model_copy(update={"folder": str(tmp_path)})
    shown = _as_run(asked, run=run)
    assert shown.placement == ran
    assert shown.identity == asked.identity
    gone = run.model_copy(update={"folder": str(tmp_path / "gone")})
    assert _as_run(asked, run=gone) == asked
