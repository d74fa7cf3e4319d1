"""A real S3 server in a process of its own, behind a proxy that can be told to fail."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Fault = Literal["pass", "500", "503", "403", "drop", "short"]


class Proxy(ThreadingHTTPServer):
    """Hands requests on; `faults` is what the next requests meet, one each, then all pass."""

    daemon_threads = True

    def __init__(self, backend_port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.backend_port = backend_port
        self.faults: list[Fault] = []
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def plan(self, *faults: Fault) -> None:
        self.faults = list(faults)
        self.requests = []


class _Handler(BaseHTTPRequestHandler):
    server: Proxy

    def log_message(self, *args: object) -> None:
        pass

    def _serve(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        fault = self.server.faults.pop(0) if self.server.faults else "pass"
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if fault == "drop":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        if fault in ("500", "503", "403"):
            self.send_response(int(fault))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        backend = http.client.HTTPConnection("127.0.0.1", self.server.backend_port, timeout=20)
        backend.request(self.command, self.path, body=body, headers=dict(self.headers))
        answer = backend.getresponse()
        content = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        if answer.getheader("Content-Length") is None:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if fault == "short":
            content = content[: len(content) // 2]
            self.close_connection = True
        if self.command != "HEAD":
            self.wfile.write(content)
        backend.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def s3_server() -> Iterator[Proxy]:
    """Start moto's S3 server and a proxy before it; end both."""
    port = _free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, process=process)
        with Proxy(port) as proxy:
            thread = threading.Thread(target=proxy.serve_forever, daemon=True)
            thread.start()
            yield proxy
            proxy.shutdown()
            thread.join()
    finally:
        process.terminate()
        process.wait(timeout=20)


def _wait_for(port: int, *, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, "the S3 server ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the S3 server does not answer")
