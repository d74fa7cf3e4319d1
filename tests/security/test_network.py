"""Addresses in data that lead into this machine's own network, at once or by a detour."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tenacity import wait_none

from diptych.core.errors import DataError
from diptych.data.files import fetch as fetching
from diptych.data.files import guard
from diptych.data.files.fetch import fetch
from diptych.data.files.guard import PrivateAddress, is_public
from diptych.data.files.store import Store
from diptych.data.indexing.index import IndexParams, index
from diptych.data.reasons import Refused
from diptych.data.shards.reader import ShardReader
from diptych.data.shards.shard import ShardParams, shard
from diptych.data.sources import SourceParams, gather
from tests.data.sources.test_tars import JPG
from tests.security.canary import Canary

OUTSIDE = "127.0.0.2"
"""An address of this machine that plays one of the internet."""

PRIVATE = (
    "127.0.0.1",
    "127.8.9.10",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "100.100.100.200",
    "0.0.0.0",
    "224.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "fd00:ec2::254",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::7f00:1",
    "2002:7f00:1::",
    "2002:a9fe:a9fe::",
)
PUBLIC = ("8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")


class Server(ThreadingHTTPServer):
    """Answers with an image, or redirects where it is told to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((OUTSIDE, 0), _Handler)
        self.places: dict[str, str] = {}
        self.asked: list[str] = []

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        place = self.server.places.get(self.path)
        self.send_response(302 if place else 404 if "missing" in self.path else 200)
        if place:
            self.send_header("Location", place)
        self.send_header("Content-Length", "0" if place else str(len(JPG)))
        self.send_header("Connection", "close")
        self.end_headers()
        if not place:
            self.wfile.write(JPG)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(guard, "is_public", lambda host: host == OUTSIDE or is_public(host))
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Names:
    """Answers of a name server: each name's addresses, one after the other."""

    def __init__(self, **answers: list[str]) -> None:
        self.answers = answers

    async def resolve(self, _: Any, host: str, port: int = 0, family: Any = None) -> list[Any]:
        known = self.answers[host.partition(".")[0]]
        address = known.pop(0) if len(known) > 1 else known[0]
        kind = socket.AF_INET6 if ":" in address else socket.AF_INET
        return [
            {
                "hostname": host,
                "host": address,
                "port": port,
                "family": kind,
                "proto": 0,
                "flags": socket.AI_NUMERICHOST,
            }
        ]


def answer(monkeypatch: pytest.MonkeyPatch, **answers: list[str]) -> None:
    names = Names(**answers)

    async def resolve(self: Any, *args: Any, **options: Any) -> list[Any]:
        return await names.resolve(self, *args, **options)

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", resolve)


def get(url: str, *, follows: bool = True) -> None:
    """Fetch as anybody would."""

    async def act() -> None:
        async with aiohttp.ClientSession() as session, session.get(url, allow_redirects=follows):
            pass

    asyncio.run(act())


def fetched(url: str) -> bytes:
    return fetch(url, max_bytes=1 << 20, schemes=("http",))


def refusal(url: str) -> Refused:
    with pytest.raises(Refused) as caught:
        fetched(url)
    return caught.value


def test_which_addresses_are_public(canary: Canary) -> None:
    canary.shows(all(is_public(address) for address in PUBLIC))
    assert [address for address in PRIVATE if is_public(address)] == []


def test_rows_with_addresses_are_refused_unless_it_is_asked_for(
    canary: Canary, tmp_path: Path
) -> None:
    port = canary.listen()
    canary.proves(lambda: get(f"http://127.0.0.1:{port}/a.jpg"), raises=aiohttp.ClientError)
    rows = [
        {
            "image": f"{scheme}://127.0.0.1:{port}/a.jpg",
            "conversations": [
                {"from": "human", "value": "<image>\nWhat?"},
                {"from": "gpt", "value": "That."},
            ],
        }
        for scheme in ("https", "http")
    ]
    text = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}]
    (tmp_path / "rows.json").write_text(json.dumps([*rows, {"conversations": text}]))
    off = SourceParams(kind="llava", path=str(tmp_path / "rows.json"))
    on = off.model_copy(update={"image_urls": "fetch"})
    for name, source, words in (
        ("off", off, "image_urls of the source 'web' to fetch"),
        ("on", on, "own network"),
    ):
        raw = gather({"web": source})
        params = IndexParams(max_quarantined_fraction=1)
        _, quarantine = index(raw, params, str(tmp_path / name))
        refused = quarantine.to_pylist()
        assert [row["reason"] for row in refused] == ["path_escapes"] * 2
        assert words in refused[0]["detail"]


def test_an_image_is_fetched_where_it_is_asked_for(
    canary: Canary, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_WAIT", wait_none())
    url = f"http://{OUTSIDE}:{server.port}"
    assert fetched(f"{url}/a.jpg") == JPG
    canary.shows(server.asked == ["/a.jpg"])
    server.places["/moved.jpg"] = f"{url}/a.jpg"
    assert fetched(f"{url}/moved.jpg") == JPG
    server.places["/round.jpg"] = f"{url}/round.jpg"
    assert refusal(f"{url}/round.jpg").reason == "missing_image"
    assert refusal(f"{url}/missing.jpg").reason == "missing_image"
    with pytest.raises(Refused, match="more than 10 bytes"):
        fetch(f"{url}/a.jpg", max_bytes=10, schemes=("http",))
    with pytest.raises(Refused, match="Only https"):
        fetch(f"{url}/a.jpg", max_bytes=10)


def test_a_fetched_image_is_the_same_from_row_to_shard(
    canary: Canary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server that answers with another image the second time spoils its sample."""
    answers = [JPG] * 3
    monkeypatch.setattr(fetching, "fetch", lambda url, **_: answers.pop(0))
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "That."}]
    row = {"image": "https://host.example/a.jpg", "conversations": turns}
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    source = SourceParams(kind="llava", path=str(tmp_path / "rows.json"), image_urls="fetch")
    raw = gather({"web": source})
    found, quarantine = index(raw, IndexParams(), str(tmp_path / "index"))
    folder, manifest = shard(found, raw, quarantine, ShardParams(), str(tmp_path / "shards"))
    canary.shows(ShardReader(folder, manifest=manifest, split="train").read(0).images == [JPG])
    answers[:] = [JPG + b"another"]
    with pytest.raises(DataError):
        shard(found, raw, quarantine, ShardParams(), str(tmp_path / "again"))


@pytest.mark.parametrize("address", ["127.0.0.1", "[::ffff:127.0.0.1]", "localhost"])
def test_an_image_in_this_machine(canary: Canary, address: str) -> None:
    port = canary.listen()
    url = f"http://{address}:{port}/a.jpg"
    canary.proves(lambda: get(url), raises=aiohttp.ClientError)
    assert refusal(url).reason in ("path_escapes", "missing_image")


@pytest.mark.parametrize("address", PRIVATE)
def test_a_name_that_leads_into_this_network(
    canary: Canary, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialled: list[str] = []

    async def dial(self: Any, sock: Any, place: Any) -> None:
        dialled.append(place[0])
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", dial)
    answer(monkeypatch, harmless=[address.partition("%")[0]])
    with pytest.raises(aiohttp.ClientError):
        get("http://harmless.example/a.jpg")
    canary.shows(dialled)
    dialled.clear()
    found = refusal("http://harmless.example/a.jpg")
    assert found.reason == "path_escapes"
    assert "own network" in str(found)
    assert dialled == []


@pytest.mark.parametrize("place", ["127.0.0.1", "localhost", "inner.example"])
def test_a_redirect_into_this_network(
    canary: Canary, server: Server, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, inner=["127.0.0.1"], localhost=["127.0.0.1"])
    url = f"http://{OUTSIDE}:{server.port}/a.jpg"
    server.places["/a.jpg"] = f"http://{place}:{canary.listen()}/latest/meta-data"
    canary.proves(lambda: get(url), raises=aiohttp.ClientError)
    assert refusal(url).reason == "path_escapes"


@pytest.mark.parametrize("place", ["https://{}/a.jpg", "ftp://{}/a.jpg", "file:///etc/passwd"])
def test_a_redirect_to_another_scheme(canary: Canary, server: Server, place: str) -> None:
    url = f"http://{OUTSIDE}:{server.port}/a.jpg"
    server.places["/a.jpg"] = place.format(OUTSIDE)
    get(url, follows=False)
    canary.shows(server.asked == ["/a.jpg"])
    assert refusal(url).reason in ("path_escapes", "missing_image")


def test_a_name_that_leads_elsewhere_when_it_is_asked_again(
    canary: Canary, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is public when it is looked at, and this machine when it is dialled."""
    url = f"http://rebind.example:{server.port}/a.jpg"
    server.places["/a.jpg"] = f"http://rebind.example:{server.port}/b.jpg"
    canary.listen(port=server.port)
    answer(monkeypatch, rebind=[OUTSIDE, "127.0.0.1"])
    canary.proves(lambda: (get(url, follows=False), get(url)), raises=aiohttp.ClientError)
    answer(monkeypatch, rebind=[OUTSIDE, "127.0.0.1"])
    assert refusal(url).reason == "path_escapes"
    assert server.asked[-1] == "/a.jpg"


def test_a_redirect_of_a_server_that_a_person_named(canary: Canary, server: Server) -> None:
    """The host that parameters name may lie in this network, and leads nowhere else in it."""
    near = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    near.places = {"/a.jpg": f"http://127.0.0.3:{canary.listen('127.0.0.3')}/a.jpg"}  # type: ignore[attr-defined]
    near.asked = []  # type: ignore[attr-defined]
    near.daemon_threads = True
    thread = threading.Thread(target=near.serve_forever, daemon=True)
    thread.start()
    root = f"http://127.0.0.1:{near.server_address[1]}"
    canary.proves(lambda: urllib.request.urlopen(f"{root}/a.jpg", timeout=10), raises=Exception)
    store = Store(root)
    assert store.read("b.jpg") == JPG
    with pytest.raises(DataError, match="own network"):
        store.read("a.jpg")
    near.shutdown()
    thread.join()
    near.server_close()


def test_a_named_host_that_moves_into_this_network(
    canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_socket(*answers: str) -> str:
        answer(monkeypatch, named=list(answers))

        async def act() -> str:
            found = guard._Guard("named.example")
            for _ in answers:
                [place] = await found.resolve("named.example", 443)
                info = (socket.AF_INET, socket.SOCK_STREAM, 0, "", (place["host"], 443))
                found.open_socket(info).close()
            return place["host"]

        return asyncio.run(act())

    canary.shows(open_socket("10.0.0.1", "10.0.0.2") == "10.0.0.2")
    with pytest.raises(PrivateAddress):
        open_socket("8.8.8.8", "10.0.0.2")
    with pytest.raises(PrivateAddress):
        open_socket("169.254.169.254")
