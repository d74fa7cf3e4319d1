"""The server answers this machine's own page alone, reads only, and lets nothing else in."""

from __future__ import annotations

import json
import re
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from diptych import cli
from diptych.core.errors import ConfigError
from diptych.dashboard.server import is_loopback, listen, make_app, own_names
from tests.dashboard.folders import make_desk, make_observed


@pytest.fixture
def client(tmp_path):
    make_observed(tmp_path, "aaaa", moved_s=1.7e9)
    make_observed(tmp_path, "bbbb", moved_s=1.6e9)
    return make_app(make_desk(tmp_path)).server.test_client()


def _call(client, first, **values):
    """Ask for the callback whose outputs begin so, as a page does; values by `<id>.<property>`."""
    callbacks = client.get("/_dash-dependencies").get_json()
    (known,) = [each for each in callbacks if each["output"].strip(".").startswith(first)]
    names = [name.rpartition(".") for name in known["output"].strip(".").split("...")]
    outputs = [{"id": name, "property": of} for name, _, of in names]

    def filled(each):
        return {**each, "value": values.get(f"{each['id']}.{each['property']}")}

    asked = {
        "output": known["output"],
        "outputs": outputs if known["output"].startswith("..") else outputs[0],
        "inputs": [filled(each) for each in known["inputs"]],
        "state": [filled(each) for each in known["state"]],
        "changedPropIds": ["chosen.data"],
    }
    return client.post("/_dash-update-component", json=asked)


WANTED = {
    "tab.value": "loss",
    "chosen.data": [{"key": "0/aaaa", "color": 0}],
    "views.data": {"steps": None, "clock": None},
    "x.value": "step",
    "smooth.value": 1,
    "log.value": [],
}


def test_the_page_has_strict_headers(client):
    found = client.get("/")
    assert found.status_code == 200
    headers = found.headers
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert not [name for name, _ in headers if name.startswith("Access-Control")]
    policy = dict(
        part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in policy["script-src"]
    assert "*" not in headers["Content-Security-Policy"]


def test_every_file_is_this_machine_s(client):
    text = client.get("/").text
    loaded = re.findall(r'(?:src|href)="([^"]+)"', text)
    assert len(loaded) > 5
    assert all(path.startswith("/") and not path.startswith("//") for path in loaded)
    for path in loaded:
        with client.get(path) as found:
            assert found.status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8421", 200),
        ("localhost:8421", 200),
        ("[::1]:8421", 200),
        ("LOCALHOST", 200),
        ("evil.example", 403),
        ("evil.example:8421", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("", 403),
    ],
)
def test_a_name_that_was_rebound_is_refused(client, host, status):
    assert client.get("/_dash-layout", headers={"Host": host}).status_code == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://127.0.0.1", 200), ("http://evil.example", 403), ("null", 403)],
)
def test_another_page_cannot_ask(client, origin, status):
    assert client.get("/_dash-layout", headers={"Origin": origin}).status_code == status


def test_the_page_opens_with_the_run_that_moved_last(client):
    layout = json.dumps(client.get("/_dash-layout").get_json())
    assert '"key": "0/aaaa"' in layout
    assert "0/bbbb" in layout


def test_a_tab_is_drawn(client):
    found = _call(client, "charts.children...opened", **{**WANTED, "tab.value": "speed"})
    assert found.status_code == 200
    titles = json.dumps(found.get_json())
    assert "Tokens per second" in titles


@pytest.mark.parametrize("wrong", [{"tab.value": "x"}, {"chosen.data": [{"key": 1}]}])
def test_what_there_is_not_is_refused_shortly(client, wrong):
    found = _call(client, "words.children", **{**WANTED, **wrong})
    assert found.status_code == 400
    assert "Traceback" not in found.text


@pytest.mark.parametrize(
    "path", ["/assets/../server.py", "/assets/%2e%2e/server.py", "/run_spec.json"]
)
def test_no_other_file_is_served(client, path):
    found = client.get(path)
    assert "import" not in found.text
    assert "num_steps" not in found.text.replace("_dash", "")


def test_only_reading_is_possible(client, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for method in ("put", "delete", "patch"):
        assert getattr(client, method)("/").status_code == 405
    client.get("/_dash-layout")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_it_listens_on_one_address(tmp_path):
    app = make_app(make_desk(tmp_path))
    server = listen(app, host="127.0.0.1", port=0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/_dash-layout"
        with urllib.request.urlopen(url) as answer:
            assert answer.status == 200
        with pytest.raises(ConfigError, match="Give another --port"):
            listen(app, host="127.0.0.1", port=server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_loopback_is_told_from_what_others_reach():
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.7", "node-3")))
    assert own_names("127.0.0.1") == set()
    assert "node-3" in own_names("node-3")


@pytest.fixture
def served(monkeypatch):
    """Return what the command would have served; nothing listens."""
    import diptych.dashboard.server as module

    seen = {}

    class Server:
        server_port = 8421

        def serve_forever(self):
            raise KeyboardInterrupt

        def server_close(self):
            seen["closed"] = True

    def listen(app, *, host, port):
        seen.update(host=host, port=port)
        return Server()

    monkeypatch.setattr(module, "listen", listen)
    return seen


def test_the_command_serves_this_machine_alone(served, tmp_path):
    make_observed(tmp_path, "aaaa")
    arguments = ["dashboard", "--runs", str(tmp_path), "--no-browser"]
    done = CliRunner().invoke(cli.cli, arguments, obj=None)
    assert done.exit_code == 0, done.output
    assert served == {"host": "127.0.0.1", "port": 8421, "closed": True}
    assert "http://127.0.0.1:8421/ shows" in done.output
    assert "WARNING" not in done.output


def test_another_address_is_warned_about(served, tmp_path):
    arguments = ["dashboard", "--runs", str(tmp_path), "--no-browser", "--host", "0.0.0.0"]
    done = CliRunner().invoke(cli.cli, arguments, obj=None)
    assert "WARNING: 0.0.0.0 is reached from other machines" in done.output
    assert "ssh -L 8421:127.0.0.1:8421" in done.output


def test_without_its_packages_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "dash", None)
    monkeypatch.setattr("diptych.serving.find_spec", lambda name: None if name == "dash" else name)
    done = CliRunner().invoke(cli.cli, ["dashboard", "--runs", str(tmp_path)], obj=None)
    assert done.exit_code == 1
    assert "kedro dashboard needs dash, which is not installed" in done.output
    assert "pip install -c constraints.txt -e '.[dashboard]'" in done.output


def test_nothing_of_the_page_is_loaded_before_it_is_asked_for():
    import subprocess

    code = "import sys, diptych.cli; print([n for n in ('dash', 'pyarrow') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_assets_are_packaged():
    folder = Path(sys.modules["diptych.dashboard.server"].__file__).parent / "assets"
    assert sorted(path.name for path in folder.iterdir()) == ["dashboard.css", "dashboard.js"]
