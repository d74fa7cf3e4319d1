"""The pipelines by name: what each holds, and that it runs on a fresh clone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from diptych.pipeline_registry import own_pipelines, register_pipelines

ROOT = Path(__file__).parent.parent
OWN = {
    "prepare": ["gather", "index", "bucket", "shard", "fit", "measure"],
    "plan": ["inspect", "survey", "search", "show"],
    "train": ["pin", "compose", "launch"],
    "export": ["write", "verify"],
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
