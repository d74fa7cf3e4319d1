"""Every node fits its function, and the catalog's kinds of entries fit what functions take."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_type_hints

import pyarrow as pa
import pytest
import yaml
from kedro.io import DataCatalog
from kedro.pipeline import Node
from pydantic import BaseModel

from diptych.core.records import Record, Section
from diptych.datasets import FigureDataset, FolderDataset, PageDataset, RecordDataset, TableDataset
from diptych.parameters import Parameters
from diptych.pipeline_registry import register_pipelines

ROOT = Path(__file__).parent.parent.parent
NODES = register_pipelines()["__default__"].nodes
CATALOG = DataCatalog.from_config(yaml.safe_load((ROOT / "conf/base/catalog.yml").read_text()))


def parameter_type(name: str) -> Any:
    """Return the type of a dotted parameter."""
    found: Any = Parameters
    for part in name.split("."):
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


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_a_node_is_named_as_its_function_and_takes_what_that_takes(node: Node):
    assert node.name == node.func.__name__
    # Some annotations are imported for type checkers only; inputs never are.
    hints = _input_hints(node.func)
    assert list(hints.values()) == [kind_of(entry) for entry in node.inputs]


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
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
    assert set(CATALOG) == made
    layers = [
        config["metadata"]["kedro-viz"]["layer"]
        for config in yaml.safe_load((ROOT / "conf/base/catalog.yml").read_text()).values()
    ]
    assert len(layers) == len(made)


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
