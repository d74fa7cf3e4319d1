from __future__ import annotations

import pytest

from diptych.core.errors import DataError
from diptych.core.files import inside, replacing, write_text


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    write_text(path, text="old")
    with pytest.raises(ZeroDivisionError), replacing(path) as partial:
        partial.write_text(f"half{1 / 0}")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_a_read_only_hard_link_is_not_written_through(tmp_path):
    cached = tmp_path / "cached"
    cached.write_text("kept")
    path = tmp_path / "file"
    path.hardlink_to(cached)
    cached.chmod(0o444)
    write_text(path, text="new")
    assert (path.read_text(), cached.read_text()) == ("new", "kept")


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../outside", "link/secret"])
def test_a_path_that_leaves_its_folder_is_refused(path, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="leaves the folder"):
        inside(path, folder=folder)


def test_a_path_inside_is_joined(tmp_path):
    assert inside("a/b.png", folder=tmp_path) == tmp_path / "a" / "b.png"
