"""Stages for real: a connector aligned first, then all weights from its release; what reruns."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file

from diptych.model.revision import digest

pytestmark = pytest.mark.slow

STAGES = {
    "align": {
        "plan": {"model": {"freeze": ["vision", "language"]}},
        "train": {"num_steps": 6, "optimizer": {"lr": 2.0e-3}},
    }
}


def write_stages(project, stages):
    path = project.path / "conf/tiny/parameters_stages.yml"
    path.write_text(yaml.safe_dump({"stages": stages}))


def told(done) -> dict[str, str]:
    """Map the nodes to whether they ran or were skipped."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"  (run|skip) ([\w.]+): ", done.stdout + done.stderr)
    return {node: what for what, node in lines}


def spec_of(project, path):
    return json.loads((project.path / "data/06_models" / path).read_text())


def weights_of(project, path):
    return load_file(project.path / "data/06_models" / path / "model.safetensors")


@pytest.fixture(scope="module")
def staged(planned, tmp_path_factory):
    project = planned.copy(tmp_path_factory.mktemp("staged") / "a project")
    write_stages(project, STAGES)
    train = project.path / "conf/tiny/parameters_train.yml"
    section = yaml.safe_load(train.read_text())
    section["train"]["num_steps"] = 8
    train.write_text(yaml.safe_dump(section))
    done = project.run("--pipelines=export")
    return project, told(done)


def test_the_main_training_begins_with_the_release_of_the_stage(staged):
    project, _ = staged
    release = project.path / "data/06_models/stages/align/release"
    model = spec_of(project, "run_spec.json")["identity"]["model"]
    assert model["weights"] == "data/06_models/stages/align/release"
    assert model["weights_sha256"] == digest(release)
    assert model["sizes"] == {}
    assert model["freeze"] == []
    stage = spec_of(project, "stages/align/run_spec.json")["identity"]
    assert (stage["num_steps"], stage["optimizer"]["lr"]) == (6, 2.0e-3)
    assert stage["model"]["freeze"] == ["vision", "language"]
    assert spec_of(project, "stages/align/run.json")["num_steps"] == 6


def test_only_the_connector_has_moved_in_the_stage_and_nothing_is_rounded(staged):
    """The first run of both: the seed's weights are those of the stage but for its connector."""
    project, _ = staged
    from diptych.core.records import RunSpec
    from diptych.data.processor import read_processor_info
    from diptych.model.assemble import build

    spec = RunSpec.model_validate(spec_of(project, "stages/align/run_spec.json")).identity
    info = read_processor_info(project.path / "data/04_feature/processor")
    drawn = dict(
        build(spec.model, tokens=info.tokens, image=info.image, seed=spec.seed).named_parameters()
    )
    aligned = weights_of(project, "stages/align/release")
    moved = {name for name in aligned if not torch.equal(aligned[name], drawn[name].detach())}
    assert moved
    assert all("merger" in name for name in moved), moved
    assert {tensor.dtype for tensor in aligned.values()} == {torch.float32}
    final = weights_of(project, "release")
    assert final.keys() == aligned.keys()
    assert any("language" in name and not torch.equal(final[name], aligned[name]) for name in final)


def test_a_change_reruns_what_follows_from_it_and_nothing_else(staged, tmp_path):
    project, first = staged
    assert first["stages.align.launch"] == first["stages.inherit"] == first["launch"] == "run"
    again = told(project.run("--pipelines=export"))
    always = {"gather", "survey"} | {
        f"{stage}{name}" for stage in ("", "stages.align.") for name in ("pin", "fork")
    }
    assert {node for node, what in again.items() if what == "run"} == always

    copy = project.copy(tmp_path / "a project")
    # The main training's change leaves the stage alone.
    changed = told(copy.run("--pipelines=train", "--params=train.seed=1,stages.align.train.seed=0"))
    assert changed["stages.align.launch"] == changed["stages.inherit"] == "skip"
    assert changed["launch"] == "run"
    before = spec_of(copy, "run_spec.json")["identity"]["model"]
    # The stage's change makes another release, and so another main run.
    stages = json.loads(json.dumps(STAGES))
    stages["align"]["train"]["optimizer"]["lr"] = 1.0e-3
    write_stages(copy, stages)
    changed = told(copy.run("--pipelines=train", "--params=train.seed=1,stages.align.train.seed=0"))
    assert {"stages.align.launch", "stages.inherit", "compose", "launch"} <= {
        node for node, what in changed.items() if what == "run"
    }
    after = spec_of(copy, "run_spec.json")["identity"]["model"]
    assert before["weights"] == after["weights"]
    assert before["weights_sha256"] != after["weights_sha256"]
    assert len(list((copy.path / "data/06_models/runs").iterdir())) == 3
    assert len(list((copy.path / "data/06_models/stages/align/runs").iterdir())) == 2


def test_one_stage_runs_by_its_name_and_a_wrong_one_is_refused(staged):
    project, _ = staged
    nodes = told(project.run("--pipelines=align"))
    assert "stages.align.verify" in nodes
    assert "launch" not in nodes
    done = project.run("--params=stages.algin.train.num_steps=3")
    assert done.returncode == 1
    assert "Did you mean 'align'?" in " ".join(done.stderr.split())


@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("git") is None, reason="DVC needs git")
def test_dvc_runs_a_recipe_with_stages(staged, tmp_path):
    project = staged[0].copy(tmp_path / "a project")
    project.start_dvc()
    project.kedro("dvc-sync", "--env=tiny")

    def repro():
        lines = project.dvc("repro", "train").splitlines()
        return [line.split("'")[1] for line in lines if line.startswith("Running stage")]

    assert repro() == ["prepare", "plan", "align", "train"]
    assert repro() == []
    stages = json.loads(json.dumps(STAGES))
    stages["align"]["train"]["num_steps"] = 7
    write_stages(project, stages)
    assert repro() == ["align", "train"]
    assert spec_of(project, "stages/align/run.json")["num_steps"] == 7
