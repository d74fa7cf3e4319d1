"""A canary: payloads that leave a trace if they are executed, read or sent.

A test first proves that its payload works, by giving it to something that is fooled; then it gives
it to Diptych. Traces are files in a folder of the canary's own, and connections to a socket.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


class Canary:
    """Payloads and the traces that they leave.

    Attributes:
        secret: text that nobody but a thief can know.
        num_proofs: how often the payloads were shown to work.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "traces"
        self._folder.mkdir()
        self.secret = f"canary-{os.urandom(8).hex()}"
        self.secret_file = folder / "secret.txt"
        self.secret_file.write_text(self.secret)
        self.num_proofs = 0
        self._listener: socket.socket | None = None

    @property
    def trace(self) -> Path:
        """A path that a payload makes; nobody else does."""
        return self._folder / "executed"

    @property
    def pickled(self) -> bytes:
        """A pickle that makes the trace when it is loaded."""
        return pickle.dumps(Bomb(self.trace))

    @property
    def python(self) -> str:
        """A Python expression that makes the trace when it is evaluated."""
        return f"__import__('os').mkdir({str(self.trace)!r})"

    @property
    def shell(self) -> str:
        """A command that makes the trace when a shell runs it."""
        return f"mkdir '{self.trace}'"

    def listen(self, host: str = "127.0.0.1", *, port: int = 0) -> int:
        """Listen on a port; a connection is a trace. It is answered with nothing."""
        self._listener = socket.create_server((host, port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        return int(self._listener.getsockname()[1])

    def traces(self) -> list[str]:
        """Name the traces that there are."""
        return sorted(path.name for path in self._folder.iterdir())

    def proves(self, act: Callable[[], Any], *, raises: type[BaseException] | None = None) -> None:
        """Show that the payload leaves a trace where something is fooled; then take the trace away.

        Args:
            act: gives the payload to what is fooled.
            raises: what that may raise when the payload has done its work.
        """
        try:
            act()
        except BaseException as error:
            if raises is None or not isinstance(error, raises):
                raise
        assert self.traces(), "the payload does nothing even where it is executed"
        for path in self._folder.iterdir():
            path.rmdir()
        self.num_proofs += 1

    def shows(self, found: object) -> None:
        """Show in another way that what is looked for can be seen: `found` must be true."""
        assert found, "what the test looks for would not be seen if it were there"
        self.num_proofs += 1

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            (self._folder / "connected").mkdir(exist_ok=True)
            connection.close()
