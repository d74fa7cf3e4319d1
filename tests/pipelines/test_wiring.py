"""Every node fits its function, and the catalog's kinds of entries fit what functions take."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_type_hints

import pyarrow as pa
import pytest
import yaml
from kedro.io import DataCatalog
from kedro.pipeline import Node, Pipeline
from pydantic import BaseModel

from diptych.core.records import Record, Section
from diptych.datasets import FigureDataset, FolderDataset, PageDataset, RecordDataset, TableDataset
from diptych.parameters import Parameters
from diptych.pipeline_registry import own_pipelines, register_pipelines
from diptych.staging import StageParams

ROOT = Path(__file__).parent.parent.parent
NODES = register_pipelines()["__default__"].nodes
STAGED = sum(own_pipelines(("align", "warm")).values(), Pipeline([])).nodes
CATALOG = DataCatalog.from_config(yaml.safe_load((ROOT / "conf/base/catalog.yml").read_text()))


def parameter_type(name: str) -> Any:
    """Return the type of a dotted parameter."""
    found: Any = Parameters
    parts = name.split(".")
    if parts[0] == "stages":
        found, parts = StageParams, parts[2:]
    for part in parts:
        found = found.model_fields[part].annotation
    return found


def kind_of(entry: str) -> Any:
    """Return the Python type that an entry of the catalog loads."""
    if entry.startswith("params:"):
        return parameter_type(entry.removeprefix("params:"))
    dataset = CATALOG.get(entry)
    if isinstance(dataset, RecordDataset):
        return dataset.record
    kinds = {TableDataset: pa.Table, PageDataset: str, FolderDataset: Path}
    return kinds[type(dataset)]


@pytest.mark.parametrize("node", STAGED, ids=lambda node: node.name)
def test_a_node_is_named_as_its_function_and_takes_what_that_takes(node: Node):
    assert node.name.rpartition(".")[2] == node.func.__name__
    # Some annotations are imported for type checkers only; inputs never are.
    hints = _input_hints(node.func)
    assert list(hints.values()) == [kind_of(entry) for entry in node.inputs]


@pytest.mark.parametrize("node", STAGED, ids=lambda node: node.name)
def test_a_node_leaves_what_the_catalog_keeps(node: Node):
    returned = inspect.signature(node.func).return_annotation
    names = {
        FigureDataset: "Figure",
        TableDataset: "pa.Table",
        PageDataset: "str",
        FolderDataset: "Path",
    }

    def name_of(entry: str) -> str:
        dataset = CATALOG.get(entry)
        if isinstance(dataset, RecordDataset):
            return dataset.record.__name__
        assert dataset is not None
        return names[type(dataset)]

    wanted = [name_of(entry) for entry in node.outputs]
    assert returned == (wanted[0] if len(wanted) == 1 else f"tuple[{', '.join(wanted)}]")


def test_the_catalog_has_what_the_nodes_make_in_their_order_and_no_more():
    made = {output for node in NODES for output in node.outputs}
    staged = {output for node in STAGED for output in node.outputs} - made
    written = yaml.safe_load((ROOT / "conf/base/catalog.yml").read_text())
    # Entries of all stages are written once, with the stage's name left open.
    assert set(written) == made | {re.sub(r"\.(align|warm)\.", ".{stage}.", name) for name in staged}
    assert all(config["metadata"]["kedro-viz"]["layer"] for config in written.values())


def test_what_a_stage_makes_is_kept_as_what_the_main_training_makes():
    for node in STAGED:
        for name in node.outputs:
            last = name.rpartition(".")[2]
            if name.startswith("stages.") and last in CATALOG:
                ours, main = vars(CATALOG.get(name)), vars(CATALOG.get(last))
                assert type(CATALOG.get(name)) is type(CATALOG.get(last))
                for field in ("record", "paths", "hashed", "ignored"):
                    assert ours.get(field) == main.get(field), name


def test_every_record_of_the_catalog_is_kept_as_json():
    records = [CATALOG.get(name) for name in CATALOG]
    for dataset in records:
        if isinstance(dataset, RecordDataset):
            assert issubclass(dataset.record, Record | Section)
            assert issubclass(dataset.record, BaseModel)
            assert dataset.path.suffix == ".json"


def _input_hints(function: Any) -> dict[str, Any]:
    names = list(inspect.signature(function).parameters)
    source = inspect.getmodule(function)
    assert source is not None
    annotations = {name: function.__annotations__[name] for name in names}
    bare = type("Bare", (), {"__annotations__": annotations})
    return get_type_hints(bare, globalns=vars(source))
