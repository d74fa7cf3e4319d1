from __future__ import annotations

import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from diptych.core.errors import ConfigError
from diptych.core.records import Alert
from diptych.monitor.sinks.webhook import Webhook, check_address

ALERT = Alert(time_s=1.0, step=7, attempt=0, kind="disk", text="1.0 GiB are free")


@pytest.fixture
def server():
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.got.append((self.path, self.headers["Content-Type"], json.loads(body)))
            self.send_response(self.server.answer)
            if self.server.answer == 307:
                self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/other")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.got, server.answer = [], 200
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def webhook(server):
    address = f"http://127.0.0.1:{server.server_port}/hook/secret-part"
    sink = Webhook("HOOK", prefix="run ab12", getenv={"HOOK": address}.get)
    sink.open()
    return sink


def test_an_alert_is_posted_as_text(server):
    sink = webhook(server)
    sink.alert(ALERT)
    sink.alert(ALERT.model_copy(update={"over": True}))
    first, second = server.got
    assert first == (
        "/hook/secret-part",
        "application/json",
        {"text": "run ab12 step 7: disk: 1.0 GiB are free"},
    )
    assert second[2] == {"text": "run ab12 step 7: over: disk: 1.0 GiB are free"}


@pytest.mark.parametrize("answer", [500, 307])
def test_an_alert_that_does_not_arrive_is_said_once_without_the_address(server, answer, caplog):
    server.answer = answer
    sink = webhook(server)
    with caplog.at_level(logging.DEBUG):
        sink.alert(ALERT)
        sink.alert(ALERT)
    # Nobody is followed to another address.
    assert [path for path, _, _ in server.got] == ["/hook/secret-part"] * 2
    assert [r.message for r in caplog.records] == [
        f"an alert did not reach the webhook: HTTP {answer}"
    ]
    assert "secret-part" not in caplog.text


def test_a_server_that_is_gone_stops_nothing(server, caplog):
    sink = webhook(server)
    server.socket.close()
    sink.alert(ALERT)
    assert "an alert did not reach the webhook: " in caplog.text
    assert "secret-part" not in caplog.text


@pytest.mark.parametrize(
    "address", ["https://hooks.example/x", "http://localhost:1/x", "http://[::1]:1/x"]
)
def test_addresses_that_may_be_used(address):
    assert check_address(address, variable="HOOK") == address


@pytest.mark.parametrize(
    "address",
    [
        "http://hooks.example/secret",
        "file:///etc/secret",
        "https:///secret",
        "ftp://secret/x",
        "http://127.0.0.1.example/secret",
    ],
)
def test_addresses_that_may_not_be_used_are_not_repeated(address):
    with pytest.raises(ConfigError, match="The address in HOOK cannot be used") as caught:
        check_address(address, variable="HOOK")
    assert "secret" not in str(caught.value)


def test_a_variable_that_is_missing_is_named():
    with pytest.raises(ConfigError, match="names HOOK, which the first rank's environment lacks"):
        Webhook("HOOK", prefix="", getenv={}.get).open()
