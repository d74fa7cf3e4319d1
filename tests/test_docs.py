"""What the documents tell people to type is there: targets, pipelines, options, files."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(p.name for p in (ROOT / "docs").glob("*.md"))]


def _path(name):
    return ROOT / name if (ROOT / name).exists() else ROOT / "docs" / name


def _commands():
    for name in DOCUMENTS:
        for block in re.findall(r"```bash\n(.*?)```", _path(name).read_text(), flags=re.DOTALL):
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    yield pytest.param(words, id=f"{name}: {' '.join(words)}")


@pytest.mark.parametrize("words", list(_commands()))
def test_a_command_exists(words):
    match words:
        case ["make", target, *_]:
            done = subprocess.run(
                ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
        case ["kedro", "run", *options] | ["kedro", "viz", "run", *options]:
            stages = _stages(options)
            for option in options:
                _check_option(option, stages=stages)
        case [
            "kedro",
            "export-energon"
            | "import-deepspeed"
            | "import-weights"
            | "families"
            | "sweep" as command,
            *_,
        ]:
            from diptych.cli import cli

            assert command in cli.commands
        case [
            "kedro",
            "runs"
            | "watch"
            | "dashboard"
            | "stop"
            | "logs"
            | "check"
            | "diagnose"
            | "profile" as command,
            *given,
        ]:
            from diptych.cli import cli

            known = {option for each in cli.commands[command].params for option in each.opts}
            known |= {
                option for each in cli.commands[command].params for option in each.secondary_opts
            }
            options = [each for each in given if each.startswith("--")]
            assert {option.partition("=")[0] for option in options} <= known
            for option in options if command == "check" else ():
                if "=" in option:
                    _check_option(option, stages=_stages(options))
        case ["kedro", "dvc-sync", *options]:
            from diptych.cli import dvc_sync

            known = {option for parameter in dvc_sync.params for option in parameter.opts}
            assert {option.partition("=")[0] for option in options} <= known
            _stages(options)
        case ["pre-commit", "install"]:
            pass
        case ["dvc", "repro"] | ["dvc", "metrics", "show"]:
            assert (ROOT / "dvc.yaml").is_file()
        case [".venv/bin/python", "-m", "pytest", path, *_]:
            assert (ROOT / path).is_file()
        case ["source", path]:
            assert path == ".venv/bin/activate"
        case ["touch", _]:
            pass
        case _:
            pytest.fail(f"no check for the command {' '.join(words)}")


def _stages(options):
    """Read the stages of the recipe that the options name."""
    import yaml

    for env in (option.removeprefix("--env=") for option in options if "--env=" in option):
        assert env == "mine" or (ROOT / "conf" / env).is_dir()
        path = ROOT / "conf" / env / "parameters_stages.yml"
        if path.is_file():
            return yaml.safe_load(path.read_text())
    return {"stages": {}}


def _check_option(option, *, stages):
    import yaml

    name, _, value = option.partition("=")
    if name == "--pipelines":
        known = (ROOT / "pipelines" / value / "pipeline.py").is_file()
        assert known or value in stages["stages"]
    elif name == "--env":
        assert value == "mine" or (ROOT / "conf" / value).is_dir()
    elif name == "--params":
        for assignment in value.split(","):
            keys = assignment.partition("=")[0].split(".")
            path = ROOT / f"conf/base/parameters_{keys[0]}.yml"
            section = stages if keys[0] == "stages" else yaml.safe_load(path.read_text())
            for key in keys:
                section = section[key]
    else:
        pytest.fail(f"no check for the option {option}")


def _examples():
    for name in DOCUMENTS:
        for number, block in enumerate(
            re.findall(r"```yaml\n(.*?)```", _path(name).read_text(), flags=re.DOTALL)
        ):
            yield pytest.param(block, id=f"{name}: {number}")


@pytest.mark.parametrize("block", list(_examples()))
def test_an_example_of_parameters_is_accepted(block):
    """Over the base files, as a recipe is; and what it freezes is in the starter's model."""
    import yaml
    from omegaconf import OmegaConf

    from diptych.model.inspect import inspect
    from diptych.parameters import check

    given = yaml.safe_load(block)
    files = (ROOT / "conf/base").glob("parameters*.yml")
    base = OmegaConf.merge(*(OmegaConf.load(path) for path in files))
    checked = check(OmegaConf.to_container(OmegaConf.merge(base, given)), runtime={})
    for section, settings in given.items():
        known = getattr(checked, section)
        assert set(settings) <= set(getattr(known, "model_fields_set", known))
    # What lies on the hub cannot be looked into from here.
    if "plan" in given and not checked.plan.model.has_files:
        assert inspect(checked.plan.model).trained


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_file_that_is_named_is_there(name):
    text = _path(name).read_text()
    for path in re.findall(r"`((?:src|tests|conf|docs|benchmarks|pipelines)/[\w./-]+)`", text):
        if "mine" not in path:
            assert (ROOT / path).exists(), f"{name} names {path}"


def test_the_readme_has_every_folder_of_the_package():
    text = (ROOT / "README.md").read_text()
    folders = {p.name for p in (ROOT / "src/diptych").iterdir() if (p / "__init__.py").is_file()}
    missing = {name for name in folders - {"pipelines"} if f"  {name}/" not in text}
    assert not missing


def test_nothing_is_said_of_the_machine():
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for name in filter(None, files):
        path = ROOT / name
        if path.is_symlink() or path.suffix in {".png", ".jpg"} or not path.is_file():
            continue
        text = path.read_text(errors="ignore")
        assert not re.search(r"(?<![\w.])/(?:work|home|root|Users)/\w", text), name
