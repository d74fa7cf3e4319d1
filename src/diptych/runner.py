"""Run nodes one after the other, but for those whose result would be the same.

In: a pipeline and a catalog. Out: the catalog's entries, made or left as they are, one line per
node that says which. A node is skipped if its fingerprint is that of its last run and its outputs
are still what that run wrote; an entry that was made again with the same content changes nothing
downstream.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kedro.runner import SequentialRunner
from kedro.runner.task import Task

import diptych
from diptych.core.files import write_text
from diptych.core.units import format_seconds
from diptych.datasets import Artifact
from diptych.fingerprint import (
    FileHashes,
    Fingerprint,
    Sources,
    hash_parameters,
    read_fingerprint,
)

if TYPE_CHECKING:
    from kedro.io import CatalogProtocol
    from kedro.pipeline import Pipeline
    from kedro.pipeline.node import Node
    from pluggy import PluginManager

ALWAYS = "always"
"""The tag of a node that looks at something no fingerprint sees, and so runs every time."""

_PARAMETERS = "params:"
_PLACES = re.compile(r"params:((stages\.\w+\.)?folders\.|prepare\.executor$)")
"""Where a node puts its output (the catalog's entry is checked instead), and where it works."""

_NAMED_CHANGES = 3

logger = logging.getLogger(__name__)


class SkippingRunner(SequentialRunner):
    """Kedro's sequential runner, without the work that would change nothing."""

    def __init__(self, is_async: bool = False, folder: Path | None = None) -> None:
        super().__init__(is_async=is_async)
        self.folder = folder or Path("data/.fingerprints")

    def _run(
        self,
        pipeline: Pipeline,
        catalog: CatalogProtocol,
        hook_manager: PluginManager | None = None,
        run_id: str | None = None,
    ) -> None:
        loads = Counter(chain.from_iterable(node.inputs for node in pipeline.nodes))
        ledger = Ledger(self.folder, catalog=catalog)
        for node in pipeline.nodes:
            now = ledger.fingerprint(node)
            reason = ledger.reason_to_run(node, now=now)
            if reason is None:
                logger.info("skip %s: unchanged", node.name)
            else:
                logger.info("run %s: %s", node.name, reason)
                ledger.forget(node)
                begin = perf_counter()
                Task(
                    node=node,
                    catalog=catalog,
                    hook_manager=hook_manager,
                    is_async=self._is_async,
                    run_id=run_id,
                ).execute()
                logger.info("done %s in %s", node.name, format_seconds(perf_counter() - begin))
                ledger.record(node, now=now)
            self._release_datasets(node, catalog, loads, pipeline)


class Ledger:
    """The fingerprints of the nodes of one project, and the judgement of what must run."""

    def __init__(
        self, folder: Path, *, catalog: CatalogProtocol, sources: Sources | None = None
    ) -> None:
        self.folder = folder
        self.catalog = catalog
        root = Path(diptych.__file__).parent
        self.sources = sources or Sources(root, known=folder / "sources.json")
        self.hash_file = FileHashes(folder / "files.json")

    def fingerprint(self, node: Node) -> Fingerprint:
        """Hash what a node's result depends on, as it is now."""
        parameters: dict[str, str] = {}
        inputs: dict[str, str] = {}
        for name in node.inputs:
            if _PLACES.match(name):
                continue
            if _is_parameter(name):
                label = name.removeprefix(_PARAMETERS)
                parameters |= hash_parameters(label, value=self.catalog.load(name))
            else:
                inputs[name] = self._digest(name) or "missing"
        function = _function(node)
        return Fingerprint(
            function=f"{function.__module__}.{function.__qualname__}",
            parameters=parameters,
            inputs=inputs,
            sources=self._source_hashes(node),
        )

    def reason_to_run(self, node: Node, *, now: Fingerprint) -> str | None:
        """Say in a few words why a node must run; None if it need not."""
        last = read_fingerprint(self._path(node))
        if ALWAYS in node.tags:
            return "looks every time"
        if not node.outputs:
            return "it has no output"
        for name in node.inputs + node.outputs:
            if not _is_parameter(name) and self._artifact(name) is None:
                return f"{name} is not kept in a file"
        if last is None:
            return "no record of an earlier run"
        changed = now.changes(last)
        if changed:
            rest = len(changed) - _NAMED_CHANGES
            more = f" and {rest} more" if rest > 0 else ""
            return f"{', '.join(changed[:_NAMED_CHANGES])}{more} changed"
        for name in node.outputs:
            digest = self._digest(name)
            if digest is None:
                return f"{name} is missing"
            if digest != last.outputs.get(name):
                return f"{name} was changed since"
        return None

    def forget(self, node: Node) -> None:
        """Drop a node's fingerprint before it runs, so that a failure leaves none."""
        self._path(node).unlink(missing_ok=True)

    def record(self, node: Node, *, now: Fingerprint) -> None:
        """Keep a node's fingerprint with the digests of what it has just written."""
        outputs = {name: self._digest(name) for name in node.outputs}
        kept = {name: digest for name, digest in outputs.items() if digest is not None}
        written = now.model_copy(update={"outputs": kept})
        write_text(self._path(node), text=written.model_dump_json(indent=1))
        self.hash_file.save()
        self.sources.save()

    def _path(self, node: Node) -> Path:
        return self.folder / f"{node.name}.json"

    def _artifact(self, name: str) -> Artifact | None:
        dataset = self.catalog.get(name)
        return dataset if isinstance(dataset, Artifact) else None

    def _digest(self, name: str) -> str | None:
        artifact = self._artifact(name)
        if artifact is None or not artifact.exists():
            return None
        return artifact.digest(hash_file=self.hash_file)

    def _source_hashes(self, node: Node) -> dict[str, str]:
        # How an output is written is part of what it becomes, so its dataset's source counts too.
        modules = {_function(node).__module__}
        modules |= {type(self.catalog.get(name)).__module__ for name in node.outputs}
        own = {name for name in modules if name.partition(".")[0] != "kedro"}
        return dict(chain.from_iterable(self.sources.hashes(name).items() for name in sorted(own)))


def _is_parameter(name: str) -> bool:
    return name == "parameters" or name.startswith(_PARAMETERS)


def _function(node: Node) -> Any:
    return getattr(node.func, "func", node.func)
