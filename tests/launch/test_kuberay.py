"""The manifest for KubeRay against the schema of what it makes."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from diptych.parameters import check
from tests.test_sync import CONF

ROOT = Path(__file__).parents[2]


@pytest.fixture
def manifest():
    return yaml.safe_load((ROOT / "docs" / "kuberay.yaml").read_text())


def _check(manifest):
    schema = json.loads(Path(__file__).with_name("kuberay_schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(manifest)


def test_the_manifest_is_a_ray_job(manifest):
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    _check(manifest)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shutdownAfterJob": True}, "'shutdownAfterJob' was unexpected"),
        ({"backoffLimit": "3"}, "'3' is not of type 'integer'"),
    ],
)
def test_a_field_that_is_not_there_is_found(manifest, change, message):
    manifest["spec"] |= change
    with pytest.raises(jsonschema.ValidationError, match=message):
        _check(manifest)


def test_its_pods_share_a_folder_and_its_command_has_parameters_that_exist(manifest):
    cluster = manifest["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in pods:
        (container,) = pod["template"]["spec"]["containers"]
        assert {"name": "shared", "mountPath": "/shared"} in container["volumeMounts"]
    values = manifest["spec"]["entrypoint"].partition("--params=")[2].rstrip('"')
    runtime = {}
    for pair in values.split(","):
        name, _, value = pair.partition("=")
        *sections, field = name.split(".")
        place = runtime
        for section in sections:
            place = place.setdefault(section, {})
        place[field] = value
    raw = {}
    for path in CONF.glob("base/parameters*.yml"):
        raw |= yaml.safe_load(path.read_text())
    raw["train"] |= {"launch": runtime["train"]["launch"]}
    raw["prepare"] |= {"executor": runtime["prepare"]["executor"]}
    checked = check(raw, runtime={})
    assert checked.train.launch.kind == checked.prepare.executor.kind == "ray"
    assert checked.train.launch.ray.address == checked.prepare.executor.address == "auto"
