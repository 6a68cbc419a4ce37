"""The engine's process: makes the engine, answers calls, and ends when the controller does.

The other half of `process_host.py`, whose boot code calls `main`. It imports nothing heavy itself, and leaves the
threads of torch to the engine. Calls run on the main thread, urgent ones on a thread beside it; those of a concurrent
engine on a thread each.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import threading
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from fsm_trainer.runtime.calls import overlaps
from fsm_trainer.runtime.failures import Failure, describe
from fsm_trainer.runtime.threads import CallThreads, LaneThread

_PR_SET_PDEATHSIG = 1


def main(fd: int, parent: int) -> None:
    """Serve the controller `parent` over the socket `fd` until it says goodbye or is gone."""
    die_with(parent)
    # A terminal's Ctrl-C or end and a job manager's SIGTERM reach the whole group; when to end is the controller's
    # decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.set_inheritable(fd, False)
    _Child(Connection(fd)).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    # The engine is closed. What its libraries left in the interpreter may take seconds to take apart, or for ever.
    os._exit(0)


def die_with(parent: int) -> None:
    """Be killed when the controller is, even while a long call keeps the pipe unread."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


class _Child:
    """One engine and the calls to it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._calls: SimpleQueue[tuple[int, str, bytes] | None] = SimpleQueue()
        self._engine: Future[object] = Future()
        self._threads = CallThreads("call")

    def serve(self) -> None:
        """Build the engine, do the calls in order, close the engine."""
        factory = self._connection.recv_bytes()
        threading.Thread(target=self._receive, name="receiver", daemon=True).start()
        try:
            self._engine.set_result(pickle.loads(factory)())
        except BaseException as error:
            self._engine.set_exception(error)
        while (call := self._calls.get()) is not None:
            if overlaps(self._engine, call[1]):
                self._threads.post(partial(self._do, *call))
            else:
                self._do(*call)
        self._threads.finish()
        self._send((None, True, self._close()))

    def _receive(self) -> None:
        """The receiver thread: sort calls onto the two lanes; the controller's end is ours."""
        urgent = LaneThread("urgent")
        try:
            while True:
                message = pickle.loads(self._connection.recv_bytes())
                if message is None:
                    self._calls.put(None)
                    continue
                call, is_urgent, method, args = message
                if is_urgent:
                    urgent.post(partial(self._do, call, method, args))
                else:
                    self._calls.put((call, method, args))
        except (EOFError, OSError):
            os._exit(1)

    def _do(self, call: int, method: str, args: bytes) -> None:
        try:
            result = getattr(self._engine.result(), method)(*pickle.loads(args))
            answer: tuple[Any, ...] = (call, True, pickle.dumps(result))
        except BaseException as error:
            # SystemExit too: a call's failure belongs to its caller.
            answer = (call, False, describe(error))
        self._send(answer)

    def _close(self) -> Failure | None:
        if self._engine.exception() is not None or not hasattr(self._engine.result(), "close"):
            return None
        try:
            getattr(self._engine.result(), "close")()  # noqa: B009 - the engine is any object
        except BaseException as error:
            return describe(error)
        return None

    def _send(self, answer: tuple[Any, ...]) -> None:
        with self._sending:
            self._connection.send_bytes(pickle.dumps(answer))
