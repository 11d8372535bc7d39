"""Tasks that run one at a time in threads of their own and hand over to one another.

A kernel program cannot be suspended from outside, and Python has no switch between plain calls, so each task has a
thread; only one of them ever holds the baton. Threads are kept and reused: a thousand short simulations start a few.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class _Worker:
    """A daemon thread that runs one function after another."""

    def __init__(self) -> None:
        self.work = threading.Lock()
        self.work.acquire()
        self.function: Callable[[], None] = lambda: None
        self.process = os.getpid()
        threading.Thread(target=self._loop, daemon=True, name="emulated-program").start()

    def _loop(self) -> None:
        while True:
            self.work.acquire()
            function, self.function = self.function, lambda: None
            function()
            _idle.append(self)


_idle: list[_Worker] = []


class Baton:
    """What a task waits for until it is its turn."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def give(self) -> None:
        """Lets the owner go on; to be given once for each wait."""
        self._lock.release()

    def wait(self, timeout_s: float = -1) -> bool:
        """Returns once the baton has been given; False when ``timeout_s`` passed first."""
        return self._lock.acquire(timeout=timeout_s)


def start(function: Callable[[], None]) -> None:
    """Runs ``function`` (which must not raise) in another thread."""
    worker = _idle.pop() if _idle else _Worker()
    if worker.process != os.getpid():  # a fork copies the list but not the threads
        _idle.clear()
        worker = _Worker()
    worker.function = function
    worker.work.release()
