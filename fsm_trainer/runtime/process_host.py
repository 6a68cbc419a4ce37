"""An engine in a process of its own, spoken to over a socket pair.

The child is a fresh interpreter that imports only what the engine needs, never the caller's main script, so it works
from a test, from `fsm-train` and from a script without a main guard alike. The price: the engine's factory must come
from an importable module. Commands and results are pickled; exceptions cross as text. The child's half is `child.py`.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

import structlog

from fsm_trainer.runtime.calls import PendingCalls
from fsm_trainer.runtime.failures import EngineDied, EngineError, Failure, HostClosed, describe

_BOOT = """
import json, sys
fd, parent, sys.path[:] = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
sys.argv[:] = sys.argv[4:]
from fsm_trainer.runtime.child import main
main(fd, parent)
"""
_GRACE_S = 5.0
"""How long a child that hung up may take to end by itself."""
_ORPHANS_GRACE_S = 2.0
"""The same for what a child that was killed leaves behind."""
_log = structlog.get_logger(__name__)


class ProcessHost:
    """An engine in a child process, which never outlives this one: it dies with it, even by kill -9."""

    def __init__(self, factory: Callable[[], object], name: str = "engine") -> None:
        """Start the child; `factory` makes the engine there. ValueError if it cannot be pickled."""
        self.name = name
        self._calls = PendingCalls()
        self._goodbye: Failure | None = None
        self._ending: str | None = None
        self._death: EngineDied | None = None
        self._callbacks: list[Callable[[EngineDied], None]] = []
        self._lock = threading.Lock()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._outbox.put(_pickled_factory(factory))
        started: Future[subprocess.Popen[bytes]] = Future()
        self._reader = threading.Thread(target=self._serve, args=(started,), name=f"{name}-reader", daemon=True)
        self._reader.start()
        self._process = started.result()

    @property
    def alive(self) -> bool:
        """Whether the child runs and was not asked to end."""
        return self._ending is None and self._reader.is_alive() and self._death is None

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Call a method after the calls submitted before, or beside them if the engine is concurrent."""
        return self._submit(False, method, args)

    def submit_urgent(self, method: str, *args: Any) -> Future[Any]:
        """Call a method beside a running call of `submit`."""
        return self._submit(True, method, args)

    def on_death(self, callback: Callable[[EngineDied], None]) -> None:
        """Call back once if the child ends unasked; at once if it already has."""
        with self._lock:
            self._callbacks.append(callback)
            death = self._death
        if death is not None:
            callback(death)

    def close(self, timeout_s: float) -> None:
        """Do what was submitted, close the engine and end the child; past `timeout_s`, kill it."""
        first = self._end("close")
        if first:
            self._calls.refuse(HostClosed(f"engine {self.name} is closed"))
            self._outbox.put(pickle.dumps(None))
        if not self._joined(timeout_s):
            _log.warning("engine_killed", engine=self.name, pid=self.pid, reason=f"not closed within {timeout_s:g} s")
            self.kill()
        elif first and self._goodbye is not None:
            raise EngineError(*self._goodbye)
        elif first and self._death is not None:
            raise self._death

    def kill(self) -> None:
        """Kill the child and wait until it is gone."""
        self._end("kill")
        self._calls.fail_all(HostClosed(f"engine {self.name} was killed"))
        self._process.kill()
        self._joined(_GRACE_S)

    def _joined(self, timeout_s: float) -> bool:
        """Whether the child is gone and its threads have ended, within the time."""
        if threading.current_thread() is self._reader:
            return True  # a death callback: it is gone already
        self._reader.join(timeout_s)
        return not self._reader.is_alive()

    def _end(self, how: str) -> bool:
        """Note that the child's end is asked for; whether nobody had before."""
        with self._lock:
            first = self._ending is None and self._death is None
            if self._ending != "kill":
                self._ending = how
            return first

    def _submit(self, urgent: bool, method: str, args: tuple[Any, ...]) -> Future[Any]:
        call, future, wanted = self._calls.add()
        if wanted:
            try:
                self._outbox.put(pickle.dumps((call, urgent, method, pickle.dumps(args))))
            except Exception as error:  # whatever an argument's own pickling raises belongs to the caller
                self._calls.fail(call, EngineError(*describe(error)))
        return future

    def _serve(self, started: Future[subprocess.Popen[bytes]]) -> None:
        """The reader thread: start the child, deliver its answers, bury it.

        The child asks the kernel to be killed when the thread that started it ends, so that thread must be this one,
        which ends after the child.
        """
        ours, theirs = socket.socketpair()
        try:
            process = self._spawn(theirs)
        except OSError as error:
            ours.close()
            started.set_exception(error)
            return
        finally:
            theirs.close()
        started.set_result(process)
        connection = Connection(os.dup(ours.fileno()))
        writer = threading.Thread(target=self._write, args=(connection,), name=f"{self.name}-writer", daemon=True)
        writer.start()
        self._read(connection, process.pid)
        exit_code = _reap(process)
        with suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)  # frees a writer that is blocked though a grandchild holds the other end
        ours.close()
        self._outbox.put(None)
        writer.join()
        connection.close()
        self._bury(EngineDied(self.name, process.pid, exit_code))
        if exit_code != 0:
            _end_group(process.pid)

    def _spawn(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        fd = theirs.fileno()
        argv = [sys.executable, "-c", _BOOT, str(fd), str(os.getpid()), json.dumps(sys.path), self.name]
        # A session of its own, because a terminal's Ctrl-C must not reach it even before it can ignore signals.
        return subprocess.Popen(argv, pass_fds=(fd,), stdin=subprocess.DEVNULL, start_new_session=True)

    def _write(self, connection: Connection) -> None:
        """The writer thread: a full pipe must never block a caller."""
        with suppress(OSError):  # the reader sees the same end of the child, and knows more of it
            while (message := self._outbox.get()) is not None:
                connection.send_bytes(message)

    def _read(self, connection: Connection, pid: int) -> None:
        """Deliver answers until the child is gone."""
        exit_fd = _exit_fd(pid)
        watched: list[Any] = [connection] if exit_fd is None else [connection, exit_fd]
        with suppress(EOFError, OSError):
            while True:
                # The child's exit does not close the pipe if a grandchild has it too; what is left is read first.
                if connection not in wait(watched):
                    break
                self._deliver(connection.recv_bytes())
        if exit_fd is not None:
            os.close(exit_fd)

    def _deliver(self, message: bytes) -> None:
        call, good, body = pickle.loads(message)
        if call is None:
            self._goodbye = body
        elif good:
            try:
                value = pickle.loads(body)
            except Exception as error:  # whatever a result's own unpickling raises belongs to the caller
                self._calls.fail(call, EngineError(*describe(error)))
            else:
                self._calls.give(call, value)
        else:
            self._calls.fail(call, EngineError(*body))

    def _bury(self, death: EngineDied) -> None:
        with self._lock:
            ending = self._ending
            unasked = ending is None or (ending == "close" and death.exit_code != 0)
            self._death = death if unasked else None
            callbacks = list(self._callbacks) if ending is None else []
        try:
            # Callbacks first: who hears of the death should hear of it before the failures that follow from it.
            for callback in callbacks:
                callback(death)
        finally:
            self._calls.fail_all(death if unasked else HostClosed(f"engine {self.name} is closed"))


def _pickled_factory(factory: Callable[[], object]) -> bytes:
    try:
        return pickle.dumps(factory)
    except Exception as error:
        raise ValueError(
            f"engine factory {factory!r} cannot be pickled ({error}): use a class or function of an importable module, "
            f"or functools.partial of one"
        ) from error


def _exit_fd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends, where the system has such."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _reap(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a child that hung up; one that lingers is killed."""
    try:
        return process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _end_group(group: int) -> None:
    """End the processes that a child which was killed or died had started: they hold its devices.

    They are asked first, since some, as multiprocessing's resource tracker, clean up when their parent is gone.
    """
    with suppress(ProcessLookupError, PermissionError):  # all are gone, or left the group for another user
        os.killpg(group, signal.SIGTERM)
        deadline = time.monotonic() + _ORPHANS_GRACE_S
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.01)
        os.killpg(group, signal.SIGKILL)
