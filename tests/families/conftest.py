"""The tiny corpus, prepared anew for every family: a processor of its own, and its costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from diptych.core.records import Layout, ProcessorInfo
from tests.conftest import TINY_SCHEDULE, Corpus
from tests.families.cases import CASES, Case
from tests.families.table import Table, column_of
from tests.runs import finish_run, make_spec


@dataclass(frozen=True)
class Prepared:
    """A family's case with what `prepare` makes for it.

    Attributes:
        name: of the case.
        case: its model and processor.
        corpus: the tiny corpus with this family's processor and costs.
        info: of that processor.
        processor: the same as transformers loads it.
    """

    name: str
    case: Case
    corpus: Corpus
    info: ProcessorInfo
    processor: Any

    def build(self, *, seed: int = 0) -> Any:
        from diptych.model.assemble import build

        model = build(
            self.case.model, tokens=self.info.tokens, image=self.info.image, seed=seed
        ).eval()
        _draw_zeros(model)
        return model


def _draw_zeros(model: Any) -> None:
    """Draw matrices that begin as zeros: behind such a connector no image would matter."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and not parameter.any():
                parameter.normal_(std=0.1, generator=generator)


@pytest.fixture(scope="session")
def prepared(request, corpus, tmp_path_factory):
    """Prepare the case that a test asks for by its name."""
    from transformers import AutoProcessor

    from diptych.data.costs import measure
    from diptych.data.processor import fit, read_processor_info

    name = request.param
    case = CASES[name]
    root = tmp_path_factory.mktemp(name.replace(" ", ""))
    processor = fit(corpus.sample_index, case.processor, str(root / "processor"))
    costs = measure(corpus.manifest, corpus.shards, processor, str(root / "sample_costs"))
    return Prepared(
        name=name,
        case=case,
        corpus=replace(corpus, processor=processor, sample_costs=costs),
        info=read_processor_info(processor),
        processor=AutoProcessor.from_pretrained(processor, local_files_only=True),
    )


@pytest.fixture(scope="session")
def released(prepared, tmp_path_factory):
    """A run that was never trained, and the release of its checkpoint."""
    import torch

    from diptych.export.write import ExportParams, write

    case, corpus = prepared.case, prepared.corpus
    spec = make_spec(corpus, layout=Layout(), model=case.model, schedule=TINY_SCHEDULE)
    model = prepared.build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    weights = {name: each.detach() for name, each in model.named_parameters()}
    run = finish_run(spec, runs=tmp_path_factory.mktemp("runs"), weights=weights)
    path = tmp_path_factory.mktemp("released") / "release"
    release: Path = write(run, corpus.processor, corpus.manifest, ExportParams(), str(path))
    return run, release


def pytest_generate_tests(metafunc):
    if "prepared" in metafunc.fixturenames:
        metafunc.parametrize("prepared", CASES, indirect=True, scope="session")


@pytest.fixture(scope="session")
def table(request):
    found = Table()
    yield found
    if request.config.getoption("--write-tables"):
        found.write()


def _name(item):
    """Name a test as the table does."""
    if item.originalname == "test_same_loss":
        return f"{item.originalname}[{item.callspec.params['name']}"
    return item.originalname


def pytest_itemcollected(item):
    """Say in pytest's report which case a test is of, and which cell of the table."""
    if "prepared" in item.fixturenames:
        item.user_properties.append(("case", item.callspec.params["prepared"]))
        column = column_of(_name(item))
        if column is not None:
            item.user_properties.append(("cell", column))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    table = item.funcargs.get("table") if hasattr(item, "funcargs") else None
    if table is not None and "prepared" in item.funcargs and report.when == "call":
        table.add(_name(item), case=item.funcargs["prepared"].name, passed=report.passed)
    return report


@pytest.fixture(autouse=True)
def _noted(table):
    """Have every test of this folder take part in the table."""
