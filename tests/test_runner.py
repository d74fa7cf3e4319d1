"""The runner does what could change something, skips the rest, and says which and why."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Node, Pipeline

from diptych.datasets import FolderDataset, PageDataset
from diptych.runner import ALWAYS, SkippingRunner

MODULE = """
from pathlib import Path

calls = []


def look():
    calls.append("look")
    return Path("outside.txt").read_text()


def shout(text, params):
    calls.append("shout")
    return text.upper() + params["mark"]


def measure(shouted):
    calls.append("measure")
    return str(len(shouted))


def fill(measured, folder):
    calls.append("fill")
    Path(folder).mkdir(exist_ok=True)
    (Path(folder) / "number.txt").write_text(measured)
    return Path(folder)


def fail(filled):
    raise RuntimeError("no")
"""


class Told(logging.Handler):
    """Keeps what the runner says of each node before it does anything."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(("run ", "skip ")):
            self.lines.append(record.getMessage())


class Project:
    """Four nodes of a module that exists only here, over files in a temporary folder."""

    folders = "params:folders.filled"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mark = "!"
        self.folder = "filled"
        self.told = Told()
        (root / "toynodes.py").write_text(MODULE)
        (root / "outside.txt").write_text("a")
        import toynodes

        self.toy = toynodes

    @property
    def pipeline(self) -> Pipeline:
        toy = self.toy
        return Pipeline(
            [
                Node(toy.look, inputs=None, outputs="text", name="look", tags=ALWAYS),
                Node(toy.shout, inputs=["text", "params:shout"], outputs="shouted", name="shout"),
                Node(toy.measure, inputs="shouted", outputs="measured", name="measure"),
                Node(
                    toy.fill,
                    inputs=["measured", self.folders],
                    outputs="filled",
                    name="fill",
                ),
            ]
        )

    def run(self, *more: Node) -> list[str]:
        """Run; return the first line that was told of each node."""
        self.toy.calls.clear()
        names = ("text", "shouted", "measured")
        catalog = DataCatalog(
            {name: PageDataset(filepath=str(self.root / f"{name}.txt")) for name in names}
            | {"filled": FolderDataset(filepath=str(self.root / self.folder))}
        )
        catalog["params:shout"] = {"mark": self.mark}
        catalog[self.folders] = self.folder
        self.told.lines.clear()
        runner = SkippingRunner(folder=self.root / "fingerprints")
        runner.run(self.pipeline + Pipeline(list(more)), catalog)
        return list(self.told.lines)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    project = Project(tmp_path)
    logger = logging.getLogger("diptych.runner")
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.addHandler(project.told)
    yield project
    logger.removeHandler(project.told)
    del sys.modules["toynodes"]


LOOKS = "run look: looks every time"
UNCHANGED = [LOOKS, "skip shout: unchanged", "skip measure: unchanged", "skip fill: unchanged"]


def test_the_first_run_does_everything_and_the_second_only_looks(project: Project):
    reason = "no record of an earlier run"
    assert project.run() == [
        LOOKS,
        f"run shout: {reason}",
        f"run measure: {reason}",
        f"run fill: {reason}",
    ]
    assert project.toy.calls == ["look", "shout", "measure", "fill"]
    assert project.run() == UNCHANGED
    assert project.toy.calls == ["look"]


def test_a_parameter_reruns_its_node_and_what_really_changes(project: Project):
    project.run()
    project.mark = "?"
    # One mark for another: as long as before, so nothing changes after `measure`.
    assert project.run() == [
        LOOKS,
        "run shout: shout.mark changed",
        "run measure: shouted changed",
        "skip fill: unchanged",
    ]
    assert (project.root / "shouted.txt").read_text() == "A?"


def test_what_a_node_that_always_looks_has_seen_goes_downstream(project: Project):
    project.run()
    (project.root / "outside.txt").write_text("longer")
    assert project.run()[1:] == [
        "run shout: text changed",
        "run measure: shouted changed",
        "run fill: measured changed",
    ]
    assert (project.root / "filled" / "number.txt").read_text() == "7"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("shouted.txt", "run shout: shouted is missing"),
        ("measured.txt", "run measure: measured is missing"),
        ("filled/number.txt", "run fill: filled is missing"),
    ],
)
def test_a_missing_output_is_made_again_and_the_rest_skipped(
    project: Project, name: str, told: str
):
    project.run()
    (project.root / name).unlink()
    lines = project.run()
    assert told in lines
    assert sum(line.startswith("run") for line in lines) == 2
    assert project.run() == UNCHANGED


def test_an_output_that_was_missing_when_it_was_recorded_is_made_again(project: Project):
    """Nothing compares equal to a digest that there was none of."""
    project.run()
    (project.root / "measured.txt").unlink()
    record = project.root / "fingerprints" / "measure.json"
    kept = json.loads(record.read_text())
    record.write_text(json.dumps({**kept, "outputs": {}}))
    assert "run measure: measured is missing" in project.run()


def test_an_output_that_someone_changed_is_made_again(project: Project):
    project.run()
    (project.root / "measured.txt").write_text("99")
    assert project.run()[2:] == [
        "run measure: measured was changed since",
        "skip fill: unchanged",
    ]
    assert (project.root / "measured.txt").read_text() == "2"


def test_an_edited_source_file_reruns_every_node_that_reaches_it(project: Project):
    project.run()
    with (project.root / "toynodes.py").open("a") as file:
        file.write("# edited\n")
    assert [line for line in project.run() if not line.startswith(LOOKS)] == [
        f"run {name}: toynodes changed" for name in ("shout", "measure", "fill")
    ]


@pytest.mark.parametrize("name", ["params:folders.filled", "params:stages.align.folders.filled"])
def test_where_a_folder_lies_counts_only_by_its_content(project: Project, name: str):
    project.folders = name
    project.run()
    project.folder = "elsewhere"
    assert project.run()[-1] == "run fill: filled is missing"
    (project.root / "filled").rename(project.root / "moved")
    project.folder = "moved"
    assert project.run() == UNCHANGED


def test_a_failed_node_leaves_no_record_and_no_later_node_runs(project: Project):
    broken = Node(project.toy.fail, inputs="filled", outputs="never", name="fail")
    with pytest.raises(RuntimeError, match="no"):
        project.run(broken)
    assert not (project.root / "fingerprints" / "fail.json").exists()
    assert (project.root / "fingerprints" / "fill.json").exists()


def test_a_rerun_that_fails_is_not_skipped_afterwards(project: Project):
    project.run()
    project.mark = "?"
    del project.toy.shout
    project.toy.shout = _failing_shout
    with pytest.raises(RuntimeError, match="stopped"):
        project.run()
    # The parameter is as before again, and so are the outputs; but nobody may trust them.
    project.mark = "!"
    with pytest.raises(RuntimeError, match="stopped"):
        project.run()


def test_an_entry_that_is_only_in_memory_is_made_each_time(project: Project):
    project.run()
    catalog = DataCatalog({"text": MemoryDataset("a"), "shouted": MemoryDataset()})
    catalog["params:shout"] = {"mark": "!"}
    pipeline = project.pipeline.only_nodes("shout")
    for _ in range(2):
        project.told.lines.clear()
        SkippingRunner(folder=project.root / "fingerprints").run(pipeline, catalog)
        assert project.told.lines == ["run shout: text is not kept in a file"]


def _failing_shout(text: str, params: dict[str, str]) -> str:
    raise RuntimeError("stopped")
