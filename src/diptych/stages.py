"""The pipelines as DVC stages, written to `dvc.yaml`.

In: the registered pipelines, the catalog's paths and the source files that the nodes reach. Out:
one stage per pipeline with its own nodes: what it reads, which parameters, what it leaves. A stage
of training is a pipeline, and so a stage of DVC. The run folders are no output: DVC empties outputs
before a stage, and a stopped run resumes from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
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
_BASE = "base"
_METRICS = "summary"
_IMAGES_BESIDE = ("llava", "internvl", "csv")
"""Kinds whose images lie beside their annotations unless `images` says where."""
_TRAINING = "stages"
_PLACES = re.compile(r"params:((stages\.\w+\.)?folders(\..*)?|prepare\.executor)")
"""Where things are and where work is done, which no result depends on."""


def write_stages(
    own: Mapping[str, Pipeline],
    *,
    catalog: CatalogProtocol,
    parameters: Parameters,
    root: Path,
    env: str = _BASE,
) -> str:
    """Write the text of `dvc.yaml`.

    Args:
        own: each pipeline's own nodes.
        catalog: the entries, with absolute paths.
        parameters: the checked parameters of `env`.
        root: the project's folder.
        env: the folder of `conf/` whose values the stages use, over those of `conf/base`.
    """
    sources = Sources(root / "src" / "diptych")
    raw = _raw_data(parameters)
    stages = {
        name: _stage(name, pipeline=pipeline, catalog=catalog, sources=sources, root=root, env=env)
        for name, pipeline in own.items()
    }
    stages["prepare"]["deps"] += raw["deps"]
    stages["prepare"]["outs"] = [*raw["outs"], *stages["prepare"]["outs"]]
    return _HEADER + yaml.safe_dump({"stages": stages}, sort_keys=False, width=100)


def _stage(
    name: str,
    *,
    pipeline: Pipeline,
    catalog: CatalogProtocol,
    sources: Sources,
    root: Path,
    env: str,
) -> dict[str, Any]:
    def path(entry: str) -> str:
        artifact = catalog.get(entry)
        assert isinstance(artifact, Artifact), f"{entry} is not one of diptych.datasets"
        return artifact.path.relative_to(root).as_posix()

    inputs = sorted(entry for entry in pipeline.inputs() if not entry.startswith("param"))
    outputs = [entry for node in pipeline.nodes for entry in node.outputs]
    stage: dict[str, Any] = {
        "cmd": _COMMAND.format(name=name) + (f" --env={env}" if env != _BASE else ""),
        "deps": [path(entry) for entry in inputs] + _source_folders(pipeline, sources=sources),
        "params": _parameters(pipeline, conf=root / "conf", env=env),
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


def _parameters(pipeline: Pipeline, *, conf: Path, env: str) -> list[dict[str, list[str]]]:
    """List what a stage reads of each file.

    Of the base's files the sections that the nodes take; of a recipe's, which may come to override
    more of them, everything from the top down.
    """
    keys = {key for name in pipeline.inputs() for key in _keys(name)}
    files: dict[str, list[str]] = {}
    for path, tree in _parameter_files(conf, env=env):
        wanted = keys if path.parent.name == _BASE else {_top(key) for key in keys}
        found = [key for key in wanted if _has(tree, key)]
        if found:
            files[path.relative_to(conf.parent).as_posix()] = _outermost(found)
    return [{file: found} for file, found in sorted(files.items())]


def _parameter_files(conf: Path, *, env: str) -> Iterator[tuple[Path, Any]]:
    for folder in dict.fromkeys((_BASE, env)):
        for path in sorted((conf / folder).glob("parameters*.yml")):
            yield path, yaml.safe_load(path.read_text(encoding="utf-8"))


def _keys(name: str) -> list[str]:
    """Name what decides a node's parameter: a stage of training has it from two places."""
    key = name.removeprefix("params:")
    if key == name or _PLACES.fullmatch(name):
        return []
    section, _, rest = key.partition(".")
    if section != _TRAINING:
        return [key]
    stage, _, within = rest.partition(".")
    return [f"{_TRAINING}.{stage}", within]


def _top(key: str) -> str:
    return key if key.startswith(f"{_TRAINING}.") else key.partition(".")[0]


def _has(tree: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = tree[part]
    return True


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
