"""The pipelines by name: what each holds, and that it runs on a fresh clone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kedro.framework.project import pipelines
from kedro.pipeline import Pipeline

from diptych.pipeline_registry import own_pipelines, register_pipelines, use_stages

ROOT = Path(__file__).parent.parent
OWN = {
    "prepare": ["gather", "index", "bucket", "shard", "fit", "measure"],
    "plan": ["inspect", "survey", "search", "show"],
    "train": ["pin", "compose", "fork", "launch"],
    "export": ["write", "verify", "attach"],
    "evaluate": ["score"],
    "report": ["trace", "pick", "plot", "summarise", "draw"],
}


def test_the_names_are_these_and_no_others():
    assert list(register_pipelines()) == [*OWN, "__default__"]
    # What `pipelines/` at the root shows is what runs.
    link = ROOT / "pipelines"
    assert link.is_symlink()
    assert not Path(link.readlink()).is_absolute()
    assert sorted(path.parent.name for path in link.glob("*/pipeline.py")) == sorted(OWN)


@pytest.mark.parametrize("name", OWN)
def test_each_has_its_own_nodes_under_its_tag(name: str):
    own = own_pipelines()[name]
    assert sorted(node.name for node in own.nodes) == sorted(OWN[name])
    tagged = register_pipelines()[name].only_nodes_with_tags(name)
    assert {node.name for node in tagged.nodes} == set(OWN[name])


@pytest.mark.parametrize("name", OWN)
def test_each_brings_what_it_needs_upstream_and_nothing_downstream(name: str):
    pipeline = register_pipelines()[name]
    assert [entry for entry in pipeline.inputs() if not entry.startswith("params:")] == []
    names = {node.name for node in pipeline.nodes}
    assert names >= set(OWN[name])
    own_outputs = {output for node in own_pipelines()[name].nodes for output in node.outputs}
    others = [node for node in pipeline.nodes if node.name not in OWN[name]]
    assert not [node.name for node in others if own_outputs & set(node.inputs)]


def test_the_default_is_all_of_them():
    names = {node.name for node in register_pipelines()["__default__"].nodes}
    assert names == {node for nodes in OWN.values() for node in nodes}


STAGE = ["inspect", "search", "pin", "compose", "fork", "launch", "write", "verify", "attach"]


@pytest.fixture
def staged() -> Iterator[dict[str, Pipeline]]:
    """The pipelines of a configuration with two stages."""
    use_stages(("align", "warm"))
    yield dict(pipelines)
    use_stages(())


def test_a_stage_is_a_pipeline_of_the_same_functions(staged: dict[str, Pipeline]):
    assert list(staged) == ["prepare", "plan", "align", "warm", *list(OWN)[2:], "__default__"]
    functions = {node.name: node.func for node in staged["__default__"].nodes}
    for stage, more in (("align", []), ("warm", ["inherit"])):
        own = staged[stage].only_nodes_with_tags(stage).nodes
        wanted = {f"stages.{stage}.{name}" for name in [*STAGE, *more]}
        assert {node.name for node in own} == wanted
        assert {node.namespace for node in own} == {f"stages.{stage}"}
        for name in STAGE:
            assert functions[f"stages.{stage}.{name}"] is functions[name]


def test_each_stage_begins_with_the_last_ones_release(staged: dict[str, Pipeline]):
    reads = {node.name: node.inputs for node in staged["__default__"].nodes}
    assert reads["stages.warm.inherit"][1:] == ["stages.align.release", "stages.align.parity"]
    assert reads["stages.inherit"][1:] == ["stages.warm.release", "stages.warm.parity"]
    assert reads["stages.align.pin"] == ["params:stages.align.plan.model"]
    assert reads["stages.warm.pin"] == ["stages.warm.model_start"]
    assert reads["pin"] == ["model_start"]
    assert "stages.warm.model_spec" in reads["stages.warm.compose"]
    assert "model_spec" in reads["compose"]


def test_a_stage_brings_what_is_upstream_and_nothing_of_what_follows(staged: dict[str, Pipeline]):
    names = {node.name for node in staged["align"].nodes}
    assert {"gather", "measure", "survey"} <= names
    assert not names & {"launch", "show", "stages.warm.launch"}
    assert {"stages.align.launch", "stages.warm.launch"} <= {
        node.name for node in staged["train"].nodes
    }
    inputs = staged["warm"].inputs()
    assert [entry for entry in inputs if not entry.startswith("params:")] == []


def test_every_stage_is_planned_before_the_first_one_trains(staged: dict[str, Pipeline]):
    order = [node.name for node in staged["__default__"].nodes]
    first = order.index("stages.align.launch")
    assert {"search", "stages.align.search", "stages.warm.search"} <= set(order[:first])


def test_without_stages_there_is_nothing_of_them():
    use_stages(("align",))
    use_stages(())
    assert list(pipelines) == [*OWN, "__default__"]
    assert not any(node.namespace for node in pipelines["__default__"].nodes)


def test_a_command_imports_nothing_slow():
    code = (
        "import sys\n"
        "import diptych.settings, diptych.cli, diptych.pipeline_registry as r, diptych.stages\n"
        "r.register_pipelines()\n"
        "slow = {'torch', 'transformers', 'pandas', 'plotly', 'sklearn', 'deepspeed', 'scipy'}\n"
        "print(sorted(slow & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
