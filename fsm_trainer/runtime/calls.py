"""The calls of one engine host that are not answered yet, and which of them may overlap.

It knows nothing of threads or pipes.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from typing import Any


class PendingCalls:
    """Futures by call id, each settled exactly once; after `fail_all` new ones are failed at once."""

    def __init__(self) -> None:
        """None pending."""
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._futures: dict[int, Future[Any]] = {}
        self._verdict: BaseException | None = None

    def add(self) -> tuple[int, Future[Any], bool]:
        """A new call: its id, its future, and whether it is to be done."""
        future: Future[Any] = Future()
        # Running at once: a host cannot take a call back, so `cancel` must say so.
        future.set_running_or_notify_cancel()
        with self._lock:
            call, verdict = next(self._ids), self._verdict
            if verdict is None:
                self._futures[call] = future
        if verdict is not None:
            future.set_exception(verdict)
        return call, future, verdict is None

    def give(self, call: int, value: Any) -> None:
        """Settle a call with its value, unless it is settled."""
        if (future := self._take(call)) is not None:
            future.set_result(value)

    def fail(self, call: int, error: BaseException) -> None:
        """Settle a call with an error, unless it is settled."""
        if (future := self._take(call)) is not None:
            future.set_exception(error)

    def refuse(self, error: BaseException) -> None:
        """Fail whatever is submitted from now on; what is pending goes on."""
        with self._lock:
            self._verdict = self._verdict or error

    def fail_all(self, error: BaseException) -> None:
        """Fail everything pending, and whatever is submitted from now on."""
        self.refuse(error)
        with self._lock:
            pending, self._futures = list(self._futures.values()), {}
        for future in pending:
            future.set_exception(error)

    def _take(self, call: int) -> Future[Any] | None:
        with self._lock:
            return self._futures.pop(call, None)


def overlaps(engine: Future[object], method: str) -> bool:
    """Whether a call of an engine, which must have been built, may run beside others.

    So it is for an engine whose class has `concurrent = True`, but for its start, which no other call may come before.
    """
    if method == "start" or engine.exception() is not None:
        return False
    return getattr(engine.result(), "concurrent", False) is True
