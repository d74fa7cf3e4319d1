"""The pipelines as DVC stages, written to `dvc.yaml`.

In: the registered pipelines, the catalog's paths and the source files that the nodes reach. Out:
one stage per pipeline with its own nodes: what it reads, which parameters, what it leaves. The
run folders are no output: DVC empties outputs before a stage, and a stopped run resumes from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

from diptych.datasets import Artifact
from diptych.fingerprint import Sources
from diptych.parameters import Parameters

_HEADER = """\
# Written by `kedro dvc-sync` from the pipelines and the catalog; a test keeps it that way.
# `dvc repro` runs what changed. The project's own .venv goes first, so that it need not be active.
"""
# `exec` lets a signal to the stage reach Kedro itself, which stops the ranks.
_COMMAND = (
    'export PATH="$PWD/.venv/bin:$PATH"; exec python -m kedro run --pipelines={name} --tags={name}'
)
_METRICS = "summary"
_IMAGES_BESIDE = ("llava", "internvl", "csv")
"""Kinds whose images lie beside their annotations unless `images` says where."""
_FOLDERS = "params:folders"


def write_stages(
    own: Mapping[str, Pipeline], *, catalog: CatalogProtocol, parameters: Parameters, root: Path
) -> str:
    """Write the text of `dvc.yaml`.

    Args:
        own: each pipeline's own nodes.
        catalog: the entries, with absolute paths.
        parameters: the checked parameters of `conf/base`.
        root: the project's folder.
    """
    sources = Sources(root / "src" / "diptych")
    raw = _raw_data(parameters)
    stages = {
        name: _stage(name, pipeline=pipeline, catalog=catalog, sources=sources, root=root)
        for name, pipeline in own.items()
    }
    stages["prepare"]["deps"] += raw["deps"]
    stages["prepare"]["outs"] = [*raw["outs"], *stages["prepare"]["outs"]]
    return _HEADER + yaml.safe_dump({"stages": stages}, sort_keys=False, width=100)


def _stage(
    name: str, *, pipeline: Pipeline, catalog: CatalogProtocol, sources: Sources, root: Path
) -> dict[str, Any]:
    def path(entry: str) -> str:
        artifact = catalog.get(entry)
        assert isinstance(artifact, Artifact), f"{entry} is not one of diptych.datasets"
        return artifact.path.relative_to(root).as_posix()

    inputs = sorted(entry for entry in pipeline.inputs() if not entry.startswith("param"))
    outputs = [entry for node in pipeline.nodes for entry in node.outputs]
    stage: dict[str, Any] = {
        "cmd": _COMMAND.format(name=name),
        "deps": [path(entry) for entry in inputs] + _source_folders(pipeline, sources=sources),
        "params": _parameters(pipeline),
        "outs": [path(entry) for entry in outputs if entry != _METRICS],
    }
    if _METRICS in outputs:
        stage["metrics"] = [{path(_METRICS): {"cache": False}}]
    return {key: value for key, value in stage.items() if value}


def _source_folders(pipeline: Pipeline, *, sources: Sources) -> list[str]:
    files = {name for node in pipeline.nodes for name in sources.files(node.func.__module__)}
    # Folders, not files: a new import within a folder must not change dvc.yaml.
    tops = {"/".join(name.split("/")[:2]) for name in files}
    own = {f"{sources.root.name}/pipelines"}
    return sorted(f"src/{top}" for top in tops - own if not top.endswith("/__init__.py"))


def _parameters(pipeline: Pipeline) -> list[dict[str, list[str]]]:
    names = {name for name in pipeline.inputs() if name.startswith("params:")}
    keys = sorted(name.removeprefix("params:") for name in names if not name.startswith(_FOLDERS))
    files: dict[str, list[str]] = {}
    for key in keys:
        file = f"conf/base/parameters_{key.partition('.')[0]}.yml"
        files.setdefault(file, []).append(key)
    return [{file: _outermost(keys)} for file, keys in sorted(files.items())]


def _outermost(keys: Iterable[str]) -> list[str]:
    kept: list[str] = []
    for key in sorted(keys):
        if not any(key.startswith(f"{outer}.") for outer in kept):
            kept.append(key)
    return kept


def _raw_data(parameters: Parameters) -> dict[str, list[Any]]:
    """List the sources' local paths: what a person brought is read, the starter data also built.

    What lies behind a URL is not DVC's to watch; `gather` looks at it in every run.
    """
    deps: set[str] = set()
    outs: list[Any] = []
    for source in parameters.prepare.sources.values():
        if source.kind == "starter":
            outs += [{path: {"persist": True}} for path in source.paths]
            continue
        paths = [*source.paths, *([source.images] if source.images else [])]
        beside = source.kind in _IMAGES_BESIDE and not source.images
        for path in paths:
            if "://" not in path:
                fixed = _without_pattern(path)
                deps.add((fixed.parent if beside and fixed.suffix else fixed).as_posix())
    inner = {dep for dep in deps for other in deps - {dep} if Path(dep).is_relative_to(other)}
    return {"deps": sorted(deps - inner), "outs": outs}


def _without_pattern(path: str) -> Path:
    """Return the part of a path before its first glob or brace pattern."""
    kept: list[str] = []
    for part in Path(path).parts:
        if any(character in part for character in "*?[{"):
            break
        kept.append(part)
    return Path(*kept)
