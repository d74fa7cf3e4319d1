"""Let loops that own their control flow take turns, a few steps each, in one process.

Each loop runs in a thread of its own and calls `yield_turn` at its step boundary; only one of them
runs at any time. A disturbance of the machine then meets all of them alike, which whole runs after
one another do not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Turns:
    """A ring of named loops of which one at a time runs."""

    def __init__(self, names: list[str]) -> None:
        self._ring = list(names)
        self._may_run = {name: threading.Semaphore(0) for name in names}
        self._errors: dict[str, BaseException] = {}

    def run(self, loops: dict[str, Callable[[], None]]) -> None:
        """Run all loops to their ends, each in a thread of its own.

        Raises:
            RuntimeError: a loop failed; its error is the cause.
        """
        threads = [
            threading.Thread(target=self._run_one, args=(name, loops[name]), daemon=True)
            for name in self._ring
        ]
        for thread in threads:
            thread.start()
        self._may_run[self._ring[0]].release()
        for thread in threads:
            thread.join()
        for name, error in self._errors.items():
            raise RuntimeError(f"the loop '{name}' failed") from error

    def yield_turn(self, name: str) -> None:
        """Hand over to the next loop, and come back when all others had their turn."""
        following = self._ring[(self._ring.index(name) + 1) % len(self._ring)]
        self._may_run[following].release()
        self._may_run[name].acquire()

    def _run_one(self, name: str, loop: Callable[[], None]) -> None:
        self._may_run[name].acquire()
        try:
            loop()
        except BaseException as error:
            self._errors[name] = error
        place = self._ring.index(name)
        self._ring.remove(name)
        if self._ring:
            self._may_run[self._ring[place % len(self._ring)]].release()
