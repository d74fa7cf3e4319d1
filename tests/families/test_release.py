"""A release of every family is what was trained, and answers as its README says."""

from __future__ import annotations

import re

import pytest
from PIL import Image

from diptych.export import reload
from diptych.export.verify import verify
from diptych.export.write import ExportParams


@pytest.fixture
def here(monkeypatch):
    """Run the reloading in this process: quicker, and tested apart in `tests/export`."""

    def run_here(commands, **_):
        for _module, *arguments in commands:
            reload.main(arguments)

    monkeypatch.setattr("diptych.export.verify.run_modules", run_here)


def test_parity(released, here):
    run, release = released
    parity = verify(release, run, ExportParams(num_samples=6))
    assert parity.passed
    assert parity.tokens_equal
    assert parity.max_abs <= 1e-5


def test_it_answers_as_its_readme_says(released, tmp_path, monkeypatch, capsys):
    _, release = released
    card = (release / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    Image.new("RGB", (80, 40), (200, 30, 30)).save(tmp_path / "picture.png")
    monkeypatch.chdir(tmp_path)
    code = code.replace("path/to/this/folder", str(release))
    capsys.readouterr()
    exec(compile(code, "README", "exec"), {})
    # Weights that were never trained may have nothing to say, and say so.
    assert capsys.readouterr().out.endswith("\n")
