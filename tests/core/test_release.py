"""A release's identity covers what computes, and its card can be filled again and again."""

import hashlib

import pytest

from diptych.core.release import (
    SCORES_BEGIN,
    SCORES_END,
    fill_score_section,
    read_score_section,
    release_checksums,
    release_sha256,
)

CARD = f"# A card\n\n## Scores\n\n{SCORES_BEGIN}\n\nNot scored yet.\n\n{SCORES_END}\n\n## Data\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "sub" / "extra.json").write_text("{}")
    (tmp_path / "README.md").write_text(CARD)
    return tmp_path


def test_checksums_are_those_of_sha256sum(folder):
    assert release_checksums(folder) == {
        "model.safetensors": hashlib.sha256(b"weights").hexdigest(),
        "sub/extra.json": hashlib.sha256(b"{}").hexdigest(),
    }


def test_the_identity_follows_weights_and_names_but_not_card_scores_or_checksums(folder):
    before = release_sha256(folder)
    fill_score_section(folder, text="0.98")
    (folder / "scores.json").write_text("{}")
    (folder / "checksums.json").write_text("{}")
    assert release_sha256(folder) == before
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert release_sha256(folder) != before
    (folder / "other.safetensors").rename(folder / "model.safetensors")
    assert release_sha256(folder) == before
    (folder / "model.safetensors").write_bytes(b"weighty")
    assert release_sha256(folder) != before


def test_the_score_section_is_replaced_and_nothing_else(folder):
    fill_score_section(folder, text="first")
    fill_score_section(folder, text="| read | 0.98 |")
    card = (folder / "README.md").read_text()
    assert card == CARD.replace("Not scored yet.", "| read | 0.98 |")
    assert read_score_section(card) == "| read | 0.98 |"


def test_filling_never_writes_through_a_hard_link(folder, tmp_path_factory):
    cached = tmp_path_factory.mktemp("cache") / "blob"
    cached.hardlink_to(folder / "README.md")
    cached.chmod(0o444)
    fill_score_section(folder, text="0.98")
    assert cached.read_text() == CARD
    assert "0.98" in (folder / "README.md").read_text()


def test_a_card_without_a_section_or_no_card_is_left_alone(folder):
    (folder / "README.md").write_text("# Mine\n")
    fill_score_section(folder, text="0.98")
    assert (folder / "README.md").read_text() == "# Mine\n"
    (folder / "README.md").unlink()
    fill_score_section(folder, text="0.98")
    assert not (folder / "README.md").exists()
