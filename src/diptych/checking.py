"""`kedro check`: a project and its configuration in, a preflight out.

The pipeline `train` runs up to the node that makes the run spec, so that what is looked at is what
would run; whatever is unchanged is skipped as ever.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from diptych.core.errors import RunError
from diptych.core.records import Cluster, Preflight, RunSpec
from diptych.launch.corpus import Depth
from diptych.launch.rehearse import rehearse
from diptych.monitor.run_folder import RunFolder
from diptych.session import Session

_LAST_NODE = "fork"


def check_project(
    project: Path, *, env: str | None, params: dict[str, Any], with_ranks: bool
) -> tuple[Preflight, Path]:
    """Compose the run that would be trained, and look at all it would meet.

    Args:
        project: its folder.
        env: the recipe.
        params: those of the command line.
        with_ranks: whether ranks are started to look, too.

    Returns:
        What was found, and the file that has it.

    Raises:
        ConfigError, DataError, LayoutError: there is no run to compose.
    """
    compose: dict[str, Any] = {"pipeline_names": ["train"], "to_nodes": [_LAST_NODE]}
    with Session.create(project, env=env, runtime_params=params, save_on_close=False) as session:
        session.run(**compose)
    later = Session.create(project, env=env, runtime_params=params, save_on_close=False)
    context = later.load_context()
    with contextlib.chdir(project):
        spec, cluster = context.catalog.load("run_spec"), context.catalog.load("cluster")
        if not isinstance(spec, RunSpec) or not isinstance(cluster, Cluster):
            raise RunError("The catalog has no run spec", cure="kedro run --pipelines=train")
        folders, index = context.params["folders"], context.params["prepare"].index
        folder = RunFolder(Path(folders.runs) / spec.run_id)
        preflight = rehearse(
            spec,
            folder=folder,
            depth=Depth(
                hashes=True, sample_index=Path(folders.sample_index), leakage=index.leakage
            ),
            with_ranks=with_ranks,
            link_bytes_per_s=cluster.link_bytes_per_s,
        )
        return preflight, folder.path / "preflight.json"
