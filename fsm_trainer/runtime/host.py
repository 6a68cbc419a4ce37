"""Where an engine lives: in this process (`InlineHost`) or in one of its own (`ProcessHost`), behind one interface.

The controller sees only futures, so a remote host can be added without a change elsewhere. A host knows nothing of
what its engine does; it calls methods by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from fsm_trainer.runtime.calls import PendingCalls, overlaps
from fsm_trainer.runtime.failures import EngineDied, EngineError, HostClosed, describe
from fsm_trainer.runtime.process_host import ProcessHost
from fsm_trainer.runtime.threads import CallThreads, LaneThread

__all__ = ["EngineDied", "EngineError", "EngineHost", "HostClosed", "InlineHost", "ProcessHost"]

_Do = Callable[[int, str, tuple[Any, ...]], None]


class EngineHost(Protocol):
    """One engine and the two lanes on which its methods are called.

    An engine that has `concurrent = True` gets each call of `submit` on a thread of its own instead, its `start` apart.

    Every failure comes through a future: EngineError when the method raised, EngineDied when the process ended
    unasked, HostClosed when the host was closed or killed.
    """

    name: str

    @property
    def alive(self) -> bool:
        """Whether a call submitted now can be done."""

    @property
    def pid(self) -> int | None:
        """The engine's process, if it has one of its own."""

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Call a method after the calls submitted before, or beside them if the engine is concurrent."""

    def submit_urgent(self, method: str, *args: Any) -> Future[Any]:
        """Call a method beside a running call of `submit`."""

    def on_death(self, callback: Callable[[EngineDied], None]) -> None:
        """Call back once if the process ends unasked, before its calls fail; at once if it already has.

        The callback runs on the host's own thread and must not block.
        """

    def close(self, timeout_s: float) -> None:
        """Do what was submitted, call the engine's own `close` if it has one, and end; past `timeout_s`, kill.

        After a `kill` it waits for nothing that was submitted.
        Raises EngineError if the engine's `close` raised, EngineDied if the process died of something else.
        """

    def kill(self) -> None:
        """End at once; what is pending fails with HostClosed."""


class InlineHost:
    """An engine in this process, on threads of its own. A hung call cannot be killed, only abandoned.

    So a `close` after a `kill` closes a concurrent engine beside what hangs in it, which frees what that holds.
    """

    def __init__(self, factory: Callable[[], object], name: str = "engine") -> None:
        """`factory` makes the engine, on the engine's thread; if it raises, every call fails with that."""
        self.name = name
        self._factory = factory
        self._calls = PendingCalls()
        self._engine: Future[object] = Future()
        self._closed = self._killed = False
        self._lane = LaneThread(f"{name}-calls")
        self._urgent = LaneThread(f"{name}-urgent")
        self._threads = CallThreads(f"{name}-call")
        self._lane.post(self._build)

    @property
    def alive(self) -> bool:
        """Until closed."""
        return not self._closed

    @property
    def pid(self) -> None:
        """None: it lives in the caller's process."""

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Call a method after the calls submitted before, or beside them if the engine is concurrent."""
        return self._submit(self._lane, self._begin, method, args)

    def submit_urgent(self, method: str, *args: Any) -> Future[Any]:
        """Call a method beside a running call of `submit`."""
        return self._submit(self._urgent, self._call, method, args)

    def on_death(self, callback: Callable[[EngineDied], None]) -> None:
        """Never calls back: it lives as long as the caller's process."""

    def close(self, timeout_s: float) -> None:
        """Do what was submitted, close the engine and end the threads; past `timeout_s`, abandon them.

        After a `kill`, close a concurrent engine and wait for nothing else.
        """
        if self._killed:
            self._close_killed(timeout_s)
        if self._closed:
            return
        call, goodbye, _ = self._calls.add()
        self._lane.post(partial(self._close_engine, call))
        self._end()
        deadline = time.monotonic() + timeout_s
        joined = [lane.join(max(0.0, deadline - time.monotonic())) for lane in (self._lane, self._urgent)]
        if not all(joined):
            self.kill()
            return
        self._calls.fail_all(HostClosed(f"engine {self.name} is closed"))  # what slipped in behind the goodbye
        error = goodbye.exception()
        if error is not None and not isinstance(error, HostClosed):  # which it is if somebody killed it meanwhile
            raise error

    def kill(self) -> None:
        """Fail what is pending and let the threads end after their present call."""
        self._killed = self._killed or not self._closed
        self._end()
        self._threads.end()
        self._calls.fail_all(HostClosed(f"engine {self.name} was killed"))

    def _end(self) -> None:
        self._closed = True
        self._calls.refuse(HostClosed(f"engine {self.name} is closed"))
        self._lane.close()
        self._urgent.close()

    def _build(self) -> None:
        try:
            self._engine.set_result(self._factory())
        except BaseException as error:
            self._engine.set_exception(error)

    def _submit(self, lane: LaneThread, do: _Do, method: str, args: tuple[Any, ...]) -> Future[Any]:
        call, future, wanted = self._calls.add()
        if wanted:
            lane.post(partial(do, call, method, args))
        return future

    def _begin(self, call: int, method: str, args: tuple[Any, ...]) -> None:
        if overlaps(self._engine, method):
            self._threads.post(partial(self._call, call, method, args))
        else:
            self._call(call, method, args)

    def _call(self, call: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            value = getattr(self._engine.result(), method)(*args)
        except BaseException as error:
            # SystemExit too: a call's failure belongs to its caller, not to this thread.
            self._calls.fail(call, EngineError(*describe(error)))
        else:
            self._calls.give(call, value)

    def _close_killed(self, timeout_s: float) -> None:
        self._killed = False
        if not self._engine.done() or not overlaps(self._engine, "close"):
            return
        failed: list[EngineError] = []

        def close() -> None:
            try:
                getattr(self._engine.result(), "close", lambda: None)()
            except BaseException as error:
                failed.append(EngineError(*describe(error)))

        lane = LaneThread(f"{self.name}-close")
        lane.post(close)
        lane.close()
        lane.join(timeout_s)
        if failed:
            raise failed[0]

    def _close_engine(self, call: int) -> None:
        self._threads.finish()
        if self._engine.exception() is None and hasattr(self._engine.result(), "close"):
            self._call(call, "close", ())
        else:
            self._calls.give(call, None)
