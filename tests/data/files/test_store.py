"""Reading files locally, from a real S3 server and over HTTP, with faults on the way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tenacity import wait_none

from diptych.core.errors import DataError
from diptych.data.files import remote
from diptych.data.files.store import ChangedFile, MissingFile, PathEscapes, Store
from tests.data.conftest import put
from tests.data.servers import Fault, Proxy

FILES = {"a.bin": bytes(range(256)) * 8, "more/b c.bin": b"bee", "empty.bin": b""}


@pytest.fixture
def local(tmp_path: Path) -> Path:
    for path, data in FILES.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(data)
    return tmp_path


@pytest.fixture
def bucket(s3: Proxy) -> str:
    put(s3, {f"data/{path}": data for path, data in FILES.items()}, bucket="store")
    s3.plan()
    return "s3://store/data"


@pytest.fixture(params=["local", "s3", "http"])
def store(request: pytest.FixtureRequest) -> Store:
    if request.param == "local":
        return Store(str(request.getfixturevalue("local")))
    url = request.getfixturevalue("bucket")
    if request.param == "http":
        url = f"{request.getfixturevalue('s3').url}/store/data"
    return Store(url)


def test_every_kind_of_store_reads_the_same(store: Store) -> None:
    for path, data in FILES.items():
        assert store.stat(path).num_bytes == len(data)
        assert store.stat(path) == store.stat(path)
        assert store.read(path) == data
        with store.open(path) as file:
            assert file.read() == data
    assert store.read_range("a.bin", offset=250, length=10) == FILES["a.bin"][250:260]
    assert store.read_range("a.bin", offset=0, length=0) == b""
    with store.open("a.bin") as file:
        assert file.seek(-3, os.SEEK_END) == len(FILES["a.bin"]) - 3
        assert file.read(10) == FILES["a.bin"][-3:]
        file.seek(5)
        assert (file.read(2), file.tell()) == (b"\x05\x06", 7)


def test_every_kind_of_store_says_what_is_not_there(store: Store) -> None:
    for path in ("none.bin", "a.bin/none", "more/none.bin"):
        for act in (store.stat, store.read, store.open):
            with pytest.raises(MissingFile, match="none"):
                act(path)
    with pytest.raises(ChangedFile):
        store.read_range("a.bin", offset=2040, length=10)
    for path in ("../x", "more/../../x", "/etc/passwd", "a\0b"):
        with pytest.raises(PathEscapes, match="leaves"):
            store.stat(path)


def test_folders_are_listed_with_sizes(local: Path, bucket: str) -> None:
    for root in (str(local), bucket):
        found = Store(root).list()
        assert {path: stat.num_bytes for path, stat in found.items()} == {
            path: len(data) for path, data in FILES.items()
        }
        assert list(found) == sorted(FILES)
        assert found["a.bin"] == Store(root).stat("a.bin")


def test_only_a_url_has_no_local_path(local: Path, bucket: str) -> None:
    assert Store(str(local)).local("a.bin") == local / "a.bin"
    assert Store(bucket).local("a.bin") is None


def test_folders_are_resolved_once_but_every_link_in_them_is_looked_at(
    local: Path, tmp_path_factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "c.bin").write_bytes(b"secret")
    (local / "deep").mkdir()
    (local / "deep" / "c.bin").write_bytes(b"c")
    (local / "deep" / "link.bin").symlink_to(outside / "c.bin")
    (local / "out").symlink_to(outside)
    store = Store(str(local))
    resolved: list[str] = []
    original = os.path.realpath
    monkeypatch.setattr(os.path, "realpath", lambda path: resolved.append(path) or original(path))
    for _ in range(3):
        assert store.read("deep/c.bin") == b"c"
        assert store.read("a.bin")
        with pytest.raises(ChangedFile):
            store.read("deep/..")
        for path in ("deep/link.bin", "out/c.bin", "deep/../../x", "out/.", "out/.."):
            with pytest.raises(PathEscapes):
                store.read(path)
    assert resolved.count(os.path.join(str(local), "deep")) == 1


def test_links_lead_out_only_where_they_may(local: Path, tmp_path_factory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "secret.bin"
    outside.write_bytes(b"secret")
    (local / "link.bin").symlink_to(outside)
    (local / "inner.bin").symlink_to("a.bin")
    assert Store(str(local)).read("inner.bin") == FILES["a.bin"]
    with pytest.raises(PathEscapes):
        Store(str(local)).read("link.bin")
    assert Store(str(local), links="follow").read("link.bin") == b"secret"
    with pytest.raises(PathEscapes):
        Store(str(local), links="follow").read("../a.bin")


def test_what_is_no_plain_file_is_refused(local: Path) -> None:
    os.mkfifo(local / "pipe")
    (local / "loop").symlink_to("loop")
    store = Store(str(local))
    for path in ("pipe", "more"):
        with pytest.raises(ChangedFile, match="not a file"):
            store.read(path)
    for path in ("loop", "n" * 300):
        with pytest.raises(MissingFile):
            store.read(path)
    assert "pipe" not in store.list()


def test_a_file_that_may_not_be_read_is_explained(local: Path, monkeypatch) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ChangedFile, match="Permission denied"):
        Store(str(local)).read("a.bin")


def test_a_folder_that_may_not_be_listed_is_no_empty_one(local: Path, monkeypatch) -> None:
    def refuse(*args: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ChangedFile, match="Permission denied"):
        Store(str(local)).list()


def test_one_file_stays_open_and_is_closed(local: Path) -> None:
    store = Store(str(local))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        store.read_range("a.bin", offset=0, length=1)
        store.read_range("more/b c.bin", offset=0, length=1)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("fault", ["500", "503", "drop", "short"])
@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_a_fault_that_passes_is_tried_again(
    s3: Proxy, bucket: str, fault: Fault, scheme: str
) -> None:
    store = Store(bucket if scheme == "s3" else f"{s3.url}/store/data")
    store.stat("a.bin")  # s3fs asks for the region first
    s3.plan(fault, fault)
    assert store.read_range("a.bin", offset=250, length=100) == FILES["a.bin"][250:350]
    assert len(s3.requests) == 3


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_a_fault_that_stays_ends_after_a_bounded_number_of_attempts(
    s3: Proxy, bucket: str, scheme: str
) -> None:
    root = bucket if scheme == "s3" else f"{s3.url}/store/data"
    store = Store(root)
    store.stat("a.bin")
    s3.plan(*["503"] * 50)
    with pytest.raises(DataError, match="cannot be read after 5 attempts") as caught:
        store.read_range("a.bin", offset=0, length=10)
    assert not isinstance(caught.value, MissingFile | ChangedFile)
    assert f"{root}/a.bin" in str(caught.value)
    assert len(s3.requests) == 5
    s3.plan(*["short"] * 50)
    with pytest.raises(DataError):
        store.read_range("a.bin", offset=0, length=10)
    assert len(s3.requests) == 5


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_a_missing_file_and_a_refused_login_fail_at_once(
    s3: Proxy, bucket: str, scheme: str
) -> None:
    store = Store(bucket if scheme == "s3" else f"{s3.url}/store/data")
    store.stat("a.bin")
    s3.plan(*["403"] * 50)
    with pytest.raises(DataError, match="refuses") as caught:
        store.read_range("a.bin", offset=0, length=10)
    assert len(s3.requests) == 1
    assert "hidden-key" not in str(caught.value)
    s3.plan()
    with pytest.raises(MissingFile):
        store.read_range("none.bin", offset=0, length=10)
    assert len(s3.requests) == 1


def test_a_stream_survives_faults_in_its_middle(s3: Proxy, bucket: str, monkeypatch) -> None:
    monkeypatch.setattr("diptych.data.files.remote._READ_AHEAD_BYTES", 500)
    with Store(bucket).open("a.bin") as file:
        first = file.read(100)
        s3.plan("drop", "short", "500")
        assert first + file.read() == FILES["a.bin"]


def test_waits_grow_and_are_random(monkeypatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("tenacity.nap.time.sleep", waits.append)
    monkeypatch.setattr(remote, "_MAX_ATTEMPTS", 8)

    def fail() -> None:
        raise TimeoutError

    for _ in range(2):
        with pytest.raises(DataError, match="TimeoutError"):
            remote.Remote("http://127.0.0.1:9")._try(fail, path="a")
    first, second = waits[:7], waits[7:]
    assert len(second) == 7
    assert first != second
    assert max(waits) <= 10
    assert all(wait <= 0.2 * 2**number for number, wait in enumerate(first))


def test_a_server_that_is_not_there_is_named(monkeypatch) -> None:
    monkeypatch.setattr(remote, "_WAIT", wait_none())
    with pytest.raises(DataError, match=r"'http://127\.0\.0\.1:9/x/a' cannot be read after"):
        Store("http://127.0.0.1:9/x").stat("a")


def test_a_server_without_ranges_is_refused(local: Path, monkeypatch) -> None:
    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, directory=str(local), **kwargs)

        def log_message(self, *args) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        store = Store(f"http://127.0.0.1:{server.server_address[1]}")
        assert store.read("a.bin") == FILES["a.bin"]
        with pytest.raises(DataError, match="whole files where a range"):
            store.read_range("a.bin", offset=3, length=4)
        server.shutdown()
        thread.join()


def test_local_files_need_no_network_library() -> None:
    code = "import sys, diptych.data.sources as s; s.gather; print('fsspec' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_what_reads_a_scheme_must_be_installed(monkeypatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ImportError("Please install gcsfs")

    monkeypatch.setattr("fsspec.core.url_to_fs", fail)
    with pytest.raises(DataError, match=r"'gs://' cannot be read.*gcsfs.*diptych\[gcs\]"):
        Store("gs://bucket/data")
