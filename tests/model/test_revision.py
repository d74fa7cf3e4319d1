import hashlib
import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from diptych.core.errors import ConfigError
from diptych.core.records import ModelSpec
from diptych.model.revision import digest, find_config, find_folder, pin

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "weights")


def make_folder(path, *, value=0.0):
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    save_file({"a": torch.full((5000,), value), "b": torch.zeros(3)}, path / "model.safetensors")
    return path


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache as huggingface_hub lays it out: blobs by hash, snapshots of links, refs."""
    cache = tmp_path / "hub"
    repo = cache / "models--someone--vlm"
    for commit, value in ((COMMIT, 1.0), (OTHER, 2.0)):
        made = make_folder(tmp_path / commit, value=value)
        snapshot = repo / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (repo / "blobs").mkdir(exist_ok=True)
        for file in made.iterdir():
            blob = repo / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
            shutil.copyfile(file, blob)
            (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "refs" / "v2").write_text(OTHER)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return repo


def test_drawn_weights_need_no_pin():
    assert pin(ModelSpec()) == ModelSpec()


def test_a_folder_is_named_by_its_digest(folder):
    pinned = pin(ModelSpec(weights=str(folder)))
    assert pinned.revision is None
    assert pinned.weights_sha256 == digest(folder)
    assert len(pinned.weights_sha256) == 64


def test_a_moved_folder_has_the_same_digest(folder, tmp_path):
    before = digest(folder)
    shutil.move(folder, tmp_path / "elsewhere")
    assert digest(tmp_path / "elsewhere") == before


def test_the_digest_notices_config_names_and_values(folder):
    found = {digest(folder)}
    (folder / "config.json").write_text('{"model_type": "qwen3_vl", "a": 1}')
    found.add(digest(folder))
    save_file({"a": torch.zeros(5000), "c": torch.zeros(3)}, folder / "model.safetensors")
    found.add(digest(folder))
    for place in (0, 2500, 4999):
        values = torch.zeros(5000)
        values[place] = 1.0
        save_file({"a": values, "c": torch.zeros(3)}, folder / "model.safetensors")
        found.add(digest(folder))
    assert len(found) == 6


def test_weights_of_another_digest_are_refused(folder):
    pinned = pin(ModelSpec(weights=str(folder)))
    assert pin(pinned) == pinned
    save_file({"a": torch.ones(5000), "b": torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"have the digest .* not .*Restore those weights"):
        pin(pinned)


def test_a_hub_id_is_named_by_its_commit(hub):
    pinned = pin(ModelSpec(weights="someone/vlm"))
    assert pinned.revision == COMMIT
    assert find_folder(pinned) == hub / "snapshots" / COMMIT
    assert find_config(pinned) == hub / "snapshots" / COMMIT / "config.json"


@pytest.mark.parametrize("revision", ["v2", OTHER])
def test_a_revision_is_followed(hub, revision):
    pinned = pin(ModelSpec(weights="someone/vlm", revision=revision))
    assert pinned.revision == OTHER
    assert pinned.weights_sha256 != pin(ModelSpec(weights="someone/vlm")).weights_sha256


def test_a_branch_that_moves_does_not_move_the_run(hub):
    pinned = pin(ModelSpec(weights="someone/vlm"))
    (hub / "refs" / "main").write_text(OTHER)
    assert find_folder(pinned).name == COMMIT


def test_each_tower_is_named_by_its_commit(hub):
    towers = {
        "vision": {"weights": "someone/vlm", "revision": "v2"},
        "language": {"weights": "someone/vlm"},
    }
    spec = pin(ModelSpec.model_validate({"family": "llava", "towers": towers}))
    assert (spec.towers.vision.revision, spec.towers.language.revision) == (OTHER, COMMIT)
    assert spec.towers.vision.weights_sha256 != spec.towers.language.weights_sha256


def test_without_the_hub_the_error_says_what_to_do(hub):
    with pytest.raises(ConfigError, match=r"'someone/else'.*copy the weights into a folder"):
        find_folder(ModelSpec(weights="someone/else"))
    with pytest.raises(ConfigError, match=r"'someone/vlm' at revision 'v9'"):
        find_config(ModelSpec(weights="someone/vlm", revision="v9"))


def test_a_folder_has_no_revision(folder):
    with pytest.raises(ConfigError, match=r"local folder.*revision to null"):
        pin(ModelSpec(weights=str(folder), revision="main"))


@pytest.mark.parametrize("weights", ["/nowhere/at/all", "only_a_name", "../there", "a/b/c"])
def test_what_is_neither_folder_nor_hub_id_is_refused(weights):
    with pytest.raises(ConfigError, match="no folder and no hub id"):
        find_folder(ModelSpec(weights=weights))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_the_cure(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ConfigError, match=rf"{name}, which would run code.*import-weights"):
        find_folder(ModelSpec(weights=str(folder)))


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    with pytest.raises(ConfigError, match=r"consolidated\.safetensors, but neither"):
        find_folder(ModelSpec(weights=str(folder)))
    (folder / "consolidated.safetensors").unlink()
    with pytest.raises(ConfigError, match="have no safetensors"):
        find_folder(ModelSpec(weights=str(folder)))
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"a folder without config\.json"):
        find_config(ModelSpec(weights=str(folder)))


@pytest.mark.parametrize(
    ("index", "found"),
    [
        ({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}, r"1 are not there: two"),
        ({"weight_map": {"a": "../one.safetensors"}}, r"no safetensors file beside it"),
        ({"weight_map": {"a": "one.bin"}}, r"no safetensors file beside it"),
        ({"weight_map": ["a"]}, "AttributeError"),
        ({}, "KeyError"),
        ('{"weight_map"', "JSONDecodeError"),
        ("[" * 100_000, "RecursionError|JSONDecodeError"),
    ],
)
def test_an_index_that_cannot_be_used_is_refused(folder, index, found):
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    text = index if isinstance(index, str) else json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=found):
        find_folder(ModelSpec(weights=str(folder)))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        (2**63).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + b'{"a": {}}',
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
        (34).to_bytes(8, "little") + b'{"a": {"data_offsets": [0, 99999]}}'[:34],
        (36).to_bytes(8, "little") + b'{"a": {"data_offsets": [0, 9999999]}}'[:36],
    ],
)
def test_a_damaged_file_is_refused(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be used"):
        digest(folder)
