"""What a fingerprint notices: every source file that a node reaches, and nothing else."""

from __future__ import annotations

import ast
import os
import shutil
from pathlib import Path

import pytest

import diptych
from diptych.fingerprint import FileHashes, Fingerprint, Sources, hash_parameters

PACKAGE = Path(diptych.__file__).parent

FILES = {
    "toy/__init__.py": "",
    "toy/node.py": "import os\nfrom toy.first import go\n\ndef f():\n    import toy.late\n",
    "toy/first.py": "from . import second\nfrom .deep.third import thing\n",
    "toy/second.py": "RUN = ['-m', 'toy.ranks']\n",
    "toy/late.py": "",
    "toy/ranks.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import toy.typed\n",
    "toy/typed.py": "",
    "toy/alone.py": "import toy.typed\n",
    "toy/deep/__init__.py": "",
    "toy/deep/third.py": "from ..deep import fourth\nthing = 1\n",
    "toy/deep/fourth.py": "",
    "toy/deep/page.html": "<p>",
    "toy/deep/templates/page.css": "p {}",
    "toy/other/__init__.py": "",
    "toy/other/page.html": "<p>",
}
REACHED = sorted(set(FILES) - {"toy/alone.py", "toy/other/__init__.py", "toy/other/page.html"})


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "toy"


def test_a_module_reaches_imports_strings_packages_and_templates(toy: Path):
    assert Sources(toy).files("toy.node") == REACHED


@pytest.mark.parametrize("name", FILES)
def test_an_edit_of_a_reached_file_and_of_no_other_is_noticed(toy: Path, name: str):
    before = Sources(toy).hashes("toy.node")
    path = toy.parent / name
    path.write_text(path.read_text() + "\n# edited\n")
    after = Sources(toy).hashes("toy.node")
    changed = sorted(key for key in after if before.get(key) != after[key])
    assert changed == ([name] if name in REACHED else [])


def test_sources_are_those_of_the_moment_they_were_read(toy: Path):
    sources = Sources(toy)
    (toy / "node.py").write_text("")
    assert sources.hashes("toy.node") != Sources(toy).hashes("toy.node")


def test_what_files_name_is_remembered_and_an_edit_of_one_is_noticed(toy, tmp_path, monkeypatch):
    known = tmp_path / "known.json"
    first = Sources(toy, known=known)
    assert first.files("toy.node") == REACHED
    first.save()
    parsed = []
    parse = ast.parse
    monkeypatch.setattr(ast, "parse", lambda text: parsed.append(text) or parse(text))
    assert Sources(toy, known=known).files("toy.node") == REACHED
    assert parsed == []
    (toy / "node.py").write_text("import toy.alone")
    edited = Sources(toy, known=known)
    assert "toy/alone.py" in edited.files("toy.node")
    assert parsed[0] == b"import toy.alone"
    edited.save()
    assert Sources(toy, known=known).files("toy.node") == edited.files("toy.node")


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"parser": "other", "files": {}}', '{"files": {"toy/node.py": 3}}']
)
def test_what_cannot_be_used_of_it_is_found_anew(toy, tmp_path, text):
    known = tmp_path / "known.json"
    known.write_text(text)
    sources = Sources(toy, known=known)
    assert sources.files("toy.node") == REACHED
    sources.save()
    assert '"toy/node.py"' in known.read_text()


@pytest.mark.parametrize(
    ("module", "needed"),
    [
        # The launcher names the worker in its command line only.
        ("diptych.launch.launch", "diptych/train/loop.py"),
        ("diptych.launch.launch", "diptych/worker.py"),
        # The run_spec keeps a hash of the training sources.
        ("diptych.train.compose", "diptych/train/loop.py"),
        # Heavy modules are imported inside functions or in fresh processes.
        ("diptych.export.write", "diptych/model/assemble.py"),
        ("diptych.export.verify", "diptych/export/reload.py"),
        ("diptych.evaluate.score", "diptych/evaluate/generate.py"),
        ("diptych.report.page", "diptych/report/templates/report.html"),
    ],
)
def test_what_our_nodes_reach_by_other_ways_than_imports(module: str, needed: str):
    assert needed in Sources(PACKAGE).hashes(module)


def test_an_edited_copy_of_our_own_module_changes_the_hash(tmp_path: Path):
    copy = tmp_path / "diptych"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = Sources(copy).hashes("diptych.launch.launch")
    assert before == Sources(PACKAGE).hashes("diptych.launch.launch")
    with (copy / "train" / "step.py").open("a") as file:
        file.write("\n")
    after = Sources(copy).hashes("diptych.launch.launch")
    assert [name for name in after if after[name] != before[name]] == ["diptych/train/step.py"]


def test_parameters_are_named_leaf_by_leaf():
    before = hash_parameters("train", value={"lr": 0.1, "optimizer": {"betas": [1, 2], "eps": 0}})
    after = hash_parameters("train", value={"lr": 0.1, "optimizer": {"betas": [1, 3], "eps": 0}})
    assert sorted(before) == ["train.lr", "train.optimizer.betas", "train.optimizer.eps"]
    fingerprints = [
        Fingerprint(function="f", parameters=parameters, inputs={}, sources={})
        for parameters in (before, after)
    ]
    assert fingerprints[1].changes(fingerprints[0]) == ["train.optimizer.betas"]


def test_an_entry_that_came_or_went_is_a_change():
    one = Fingerprint(function="f", parameters={}, inputs={"a": "1"}, sources={})
    two = Fingerprint(function="g", parameters={}, inputs={"b": "1"}, sources={})
    assert two.changes(one) == ["the node's function", "a", "b"]


def test_small_files_are_hashed_even_if_size_and_time_are_equal(tmp_path: Path):
    path, hash_file = tmp_path / "file", FileHashes(tmp_path / "known.json")
    path.write_bytes(b"a" * 10)
    os.utime(path, ns=(5, 5))
    before = hash_file(path)
    path.write_bytes(b"b" * 10)
    os.utime(path, ns=(5, 5))
    assert hash_file(path) != before


def test_large_files_are_hashed_again_when_their_time_changes(tmp_path: Path):
    path, known = tmp_path / "file", tmp_path / "known.json"
    path.write_bytes(b"a" * (2 << 20))
    os.utime(path, ns=(5, 5))
    hash_file = FileHashes(known)
    before = hash_file(path)
    hash_file.save()
    path.write_bytes(b"b" * (2 << 20))
    os.utime(path, ns=(5, 5))
    # Remembered over runs: that is the point, and why the time counts.
    assert FileHashes(known)(path) == before
    os.utime(path, ns=(6, 6))
    assert FileHashes(known)(path) != before


def test_a_damaged_memory_of_hashes_is_no_error(tmp_path: Path):
    known = tmp_path / "known.json"
    known.write_text("{")
    assert len(FileHashes(known)(known)) == 32
