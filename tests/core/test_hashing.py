from __future__ import annotations

import hashlib

from diptych.core.hashing import canonical_json, sha256_file, sha256_folder, sha256_json, xxh3_file


def test_equal_values_have_equal_text():
    assert canonical_json({"b": 1, "a": "é"}) == '{"a":"é","b":1}'


def test_sha256_json_is_the_hash_of_that_text():
    expected = hashlib.sha256(b'{"a":[1,2]}').hexdigest()
    assert sha256_json({"a": [1, 2]}) == expected


def test_file_hashes_agree_with_their_references(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    # FIPS 180-2, appendix B.1, and the reference vector of xxHash's own xxhsum -H2.
    assert sha256_file(path).startswith("ba7816bf8f01cfea414140de5dae2223")
    assert xxh3_file(path) == "06b05ab6733a618578af5f94892f3950"


def test_a_folder_hash_sees_names_and_contents(tmp_path):
    (tmp_path / "a").write_text("1")
    first = sha256_folder(tmp_path)
    (tmp_path / "note").write_text("x")
    assert sha256_folder(tmp_path, exclude=frozenset({"note"})) == first
    assert sha256_folder(tmp_path) != first
    (tmp_path / "note").unlink()
    (tmp_path / "a").rename(tmp_path / "b")
    assert sha256_folder(tmp_path) != first
