"""Parameters and catalog entries that name code, read secrets, or lead a run to write elsewhere."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.utils import instantiate
from kedro.config import OmegaConfigLoader
from kedro.framework.project import configure_project
from kedro.io import DataCatalog
from omegaconf import OmegaConf
from pluggy import PluginManager

from diptych.core.errors import ConfigError
from diptych.datasets import PageDataset
from diptych.guards import KINDS, check_catalog, check_links, places
from diptych.session import Context
from diptych.settings import CONFIG_LOADER_ARGS
from tests.security.canary import Canary

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project's configuration, with a recipe that came from somewhere."""
    project = tmp_path / "project"
    shutil.copytree(ROOT / "conf" / "base", project / "conf" / "base")
    for name in ("conf/theirs", "data/06_models", "data/08_reporting", ".git/hooks"):
        (project / name).mkdir(parents=True)
    return project


def open_context(project: Path) -> Context:
    """Make the context as `kedro run --env=theirs` does."""
    configure_project("diptych")
    loader = OmegaConfigLoader(
        str(project / "conf"), env="theirs", **{**CONFIG_LOADER_ARGS, "default_run_env": "theirs"}
    )
    return Context(
        project_path=project,
        config_loader=loader,
        env="theirs",
        package_name="diptych",
        hook_manager=PluginManager("kedro"),
    )


def load(project: Path) -> Any:
    context = open_context(project)
    return context.params, context._get_catalog()


def recipe(project: Path, name: str, text: str) -> None:
    (project / "conf" / "theirs" / name).write_text(text)


def test_the_project_as_it_is(canary: Canary, project: Path, tmp_path: Path) -> None:
    """What is refused below is refused for its own fault; `data` itself may be a link."""
    context = open_context(project)
    entries = context.config_loader["catalog"]
    written = places(entries, context.params["folders"].model_dump().values())
    canary.shows(len(written) > 40)
    check_catalog(entries)
    check_links(written, project=project)
    (project / "data").rename(tmp_path / "disk")
    (project / "data").symlink_to(tmp_path / "disk")
    (project / "data" / "08_reporting" / "here").symlink_to("../06_models")
    (project / "data" / "08_reporting" / "summary.json").symlink_to(canary.secret_file)
    check_links([*written, "data/08_reporting/here/a.html"], project=project)


@pytest.mark.parametrize("place", ["train", "plan: {model", "prepare: {sources: {a"])
def test_a_target_in_the_parameters(canary: Canary, project: Path, place: str) -> None:
    named = {"_target_": "os.mkdir", "path": str(canary.trace)}
    canary.proves(lambda: instantiate(OmegaConf.create(named)))
    closing = "}" * place.count("{")
    text = f"{place}: {{_target_: os.mkdir, path: '{canary.trace}'}}{closing}\n"
    recipe(project, "parameters_theirs.yml", text)
    with pytest.raises(ConfigError, match="_target_"):
        load(project)


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("parameters_theirs.yml", "object/apply:os.mkdir"),
        ("parameters_theirs.yml", "object/new:os.mkdir"),
        ("parameters_theirs.yml", "module:os"),
        ("catalog_theirs.yml", "object/apply:os.mkdir"),
    ],
)
def test_a_python_tag(canary: Canary, project: Path, name: str, tag: str) -> None:
    text = f"train: !!python/{tag} ['{canary.trace}']\n"
    harmful = text.replace(tag, "object/apply:os.mkdir")
    canary.proves(lambda: yaml.unsafe_load(harmful))
    recipe(project, name, text)
    with pytest.raises(Exception, match="python/") as caught:
        load(project)
    assert isinstance(caught.value, ConfigError | yaml.YAMLError)


@pytest.mark.parametrize(
    "resolver", ["${oc.env:CANARY_TOKEN}", "${oc.env:HOME,none}", "${env:CANARY_TOKEN}"]
)
@pytest.mark.parametrize("name", ["parameters_theirs.yml", "catalog_theirs.yml"])
def test_a_resolver_that_reads_the_environment(
    canary: Canary,
    project: Path,
    name: str,
    resolver: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CANARY_TOKEN", canary.secret)
    from omegaconf.resolvers import oc

    canary.shows(oc.env("CANARY_TOKEN") == canary.secret)
    if name.startswith("parameters"):
        recipe(project, name, f"prepare: {{processor: {{source: '{resolver}'}}}}\n")
    else:
        entry = {"type": "diptych.datasets.PageDataset", "filepath": f"data/{resolver}"}
        recipe(project, name, yaml.safe_dump({"stolen": entry}))
    with pytest.raises(Exception, match="Unsupported interpolation") as caught:
        load(project)
    assert canary.secret not in str(caught.value)


def module_that_sings(folder: Path, canary: Canary, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"evil_{canary.secret[7:]}"
    folder.mkdir()
    (folder / f"{name}.py").write_text(
        f"{canary.python}\nfrom diptych.datasets import PageDataset as Evil\n"
    )
    monkeypatch.syspath_prepend(folder)
    return name


def test_a_catalog_entry_of_another_type(
    canary: Canary, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = module_that_sings(tmp_path / "evil", canary, monkeypatch)
    entry = {"type": f"{name}.Evil", "filepath": "data/a.html"}
    canary.proves(lambda: DataCatalog.from_config({"evil": entry})["evil"])
    for kind in (f"{name}.Evil", f"{name}.Other", "pickle.PickleDataset", "os.system"):
        recipe(project, "catalog_theirs.yml", yaml.safe_dump({"evil": {**entry, "type": kind}}))
        with pytest.raises(ConfigError, match="which Kedro would import"):
            load(project)


def test_a_catalog_entry_with_code_beside_it(canary: Canary, project: Path) -> None:
    entry = {"type": "diptych.datasets.PageDataset", "filepath": "data/a.html"}
    canary.shows(isinstance(DataCatalog.from_config({"a": entry})["a"], PageDataset))
    recipe(project, "catalog_theirs.yml", yaml.safe_dump({"a": {**entry, "validator": "os.mkdir"}}))
    with pytest.raises(ConfigError, match="has 'validator'"):
        load(project)


def test_the_kinds_are_those_of_the_catalog(canary: Canary) -> None:
    entries = yaml.safe_load((ROOT / "conf" / "base" / "catalog.yml").read_text())
    used = {entry["type"] for entry in entries.values()}
    canary.shows(used)
    assert used == KINDS


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("data/08_reporting", "outside"),
        ("data/08_reporting", ".git/hooks"),
        ("data/06_models/runs", "outside"),
        ("data/06_models/stages", "outside"),
    ],
)
def test_a_link_that_came_with_the_data(
    canary: Canary, project: Path, tmp_path: Path, link: str, target: str
) -> None:
    """`dvc pull` follows it (its issue 11101), and a run would too."""
    away = tmp_path / "outside" if target == "outside" else project / target
    away.mkdir(exist_ok=True)
    shutil.rmtree(project / link, ignore_errors=True)
    (project / link).symlink_to(away)
    PageDataset(filepath=str(project / link / "report.html")).save("<p>")
    canary.shows((away / "report.html").exists())
    (away / "report.html").unlink()
    with pytest.raises(ConfigError, match="link that leads out of the project"):
        load(project)
    assert os.listdir(away) == []


def test_a_link_in_the_place_of_a_file(canary: Canary, project: Path) -> None:
    """A file is replaced, and never written through a link."""
    link = project / "data" / "08_reporting" / "report.html"
    link.symlink_to(canary.secret_file)
    canary.shows(link.read_text() == canary.secret)
    PageDataset(filepath=str(link)).save("<p>")
    assert canary.secret_file.read_text() == canary.secret
    assert not link.is_symlink()
