"""One reward process, spoken to by one thread: start it, give it parts to score, see it die, bury it with its children.

The other half is `reward_worker.py`. A process never outlives its parent, whatever a reward function does in it.
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
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from fsm_trainer.data.reward_batch import RewardFailure, Value
from fsm_trainer.data.reward_board import SharedBoard, board_file
from fsm_trainer.data.reward_contracts import FunctionInfo
from fsm_trainer.data.reward_specs import Source
from fsm_trainer.data.user_code import UserCodeError

_BOOT = """
import json, sys
fd, board, parent, sys.path[:] = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
del sys.argv[1:]
from fsm_trainer.data.reward_worker import main
main(fd, board, parent)
"""
_LOOK_S = 0.2
"""How often to look for a dead child where the system gives no descriptor to wait for."""
_GRACE_S = 2.0
"""How long a process that was told to end may take."""


class RewardProcessError(RuntimeError):
    """A reward process that does not start."""


class PartResult(NamedTuple):
    """What became of one part."""

    values: list[tuple[int, Value]]
    """Completions (counted within the part) that have a value or a failure."""
    untold: list[int]
    """Those that have none because the process died before or while they were scored."""
    blamed: list[int]
    """Those of `untold` whose call ran when it died."""
    death: RewardFailure | None
    """How it died, if it did; the process is buried then."""


class RewardProcess:
    """A child that runs reward functions. Everything but `kill` is for one thread, which must outlive the child:
    the kernel kills the child when the thread that started it ends.
    """

    def __init__(self, output: int = subprocess.DEVNULL) -> None:
        """Start it; `output` takes what the functions print."""
        self._lock = threading.Lock()
        self._buried = False
        board = board_file()
        self._board = SharedBoard(board)
        try:
            self._connection, self._process = _start(board, output)
        except BaseException:
            self._board.close()
            raise
        self._exit_fd = _exit_fd(self._process.pid)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def score(self, number: int, body: bytes, count: int, limit_s: float | None, patience_s: float = 0.0) -> PartResult:
        """Score a pickled part of `count` completions by function `number`; a call past `limit_s` (and, where the
        child ends it itself, `patience_s`) kills the process.
        """
        self._board.clear(count)
        told: list[tuple[int, Value]] = []
        self._board.write_part(body)
        with suppress(OSError):  # a dead child's socket: its death is seen below
            self._connection.send_bytes(pickle.dumps((number, limit_s, len(body))))
        late_ns: int | None = None
        watch_s = None if limit_s is None else limit_s + patience_s
        while late_ns is None:
            message = self._receive(self._pause(watch_s))
            if message == b"":
                return PartResult([*told, *self._board.read(count)], [], [], None)
            if message:
                index, failure = pickle.loads(message)
                told.extend((i, failure) for i in (range(count) if index is None else (index,)))
            elif self._dead():
                break
            else:
                late_ns = self._late(watch_s)
        if late_ns is not None:
            self.kill()
        result = self._after_death(told, count, late_ns)
        if late_ns is None:
            return result
        late = RewardFailure("timeout", "RewardTimeout", f"a call took longer than {limit_s:g} s")
        return result._replace(death=late)

    def kill(self) -> None:
        """Kill it and whatever it started; from any thread."""
        with self._lock:
            if not self._buried:
                self._signal()

    def close(self, timeout_s: float = _GRACE_S) -> None:
        """Let it end, or kill it after the time; nothing it started is left."""
        if not self._buried:
            with suppress(OSError):
                self._connection.send_bytes(pickle.dumps((None, None, None)))
            deadline = time.monotonic() + timeout_s
            while not self._dead() and time.monotonic() < deadline:
                self._receive(deadline - time.monotonic())
            self._bury()
        self._connection.close()
        self._board.close()

    def load(self, sources: Sequence[Source]) -> list[FunctionInfo]:
        """Load the functions and wait for it. ValueError names what cannot be loaded."""
        with suppress(OSError):
            self._connection.send_bytes(pickle.dumps(list(sources)))
        while (message := self._receive(None)) is None and not self._dead():
            pass
        if message is None:
            raise UserCodeError(f"{_names(sources)} cannot be loaded: it ended the process, which {self._bury()}")
        answer: Any = pickle.loads(message)
        if isinstance(answer, list):
            return answer
        is_users, failure = answer
        if is_users or failure.type == "ValueError":
            raise UserCodeError(failure.message)
        raise UserCodeError(f"{_names(sources)} cannot be loaded: {failure.type}: {failure.message}")

    def _receive(self, pause_s: float | None) -> bytes | None:
        """The next message; None after the pause or at the child's end. What it sent before its end comes first."""
        if self._exit_fd is None:
            pause_s = _LOOK_S if pause_s is None else min(pause_s, _LOOK_S)
        watched: list[Any] = [self._connection, *([] if self._exit_fd is None else [self._exit_fd])]
        if self._connection not in wait(watched, pause_s):
            return None
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            # It has ended or is about to; a function that only closed our socket would let us wait for ever.
            if self._exit_fd is not None:
                wait([self._exit_fd], _GRACE_S)
            self.kill()
            return None

    def _pause(self, limit_s: float | None) -> float | None:
        if limit_s is None:
            return None
        began = self._board.call_began_ns
        return limit_s if not began else max(0.0, limit_s - (time.monotonic_ns() - began) / 1e9)

    def _late(self, limit_s: float | None) -> int | None:
        """When the running call began, if it has taken too long."""
        began = self._board.call_began_ns
        took = (time.monotonic_ns() - began) / 1e9
        return began if began and limit_s is not None and took >= limit_s else None

    def _after_death(self, told: list[tuple[int, Value]], count: int, late_ns: int | None) -> PartResult:
        how = self._bury()
        with suppress(EOFError, OSError):  # what it sent before it died
            while self._connection.poll():
                message = self._connection.recv_bytes()
                told.append(pickle.loads(message))
        death = RewardFailure("crash", "RewardCrash", f"its process {how}")
        # The late call may have ended in the last moment; the one that runs then is not to blame.
        innocent = late_ns is not None and late_ns != self._board.call_began_ns
        blamed = [] if innocent else list(self._board.open_call())
        known = {index for index, _ in told}
        untold = [index for index in self._board.untold(count) if index not in known]
        values = [*told, *self._board.read(count)]
        self.close()
        return PartResult(values, untold, [index for index in blamed if index in untold], death)

    def _dead(self) -> bool:
        """Whether the child has ended; without taking its exit code, so that its id stays its own."""
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return found is not None

    def _bury(self) -> str:
        """Kill what is left of the child's session, take its exit code; how it ended, in words."""
        with self._lock:
            if not self._buried:
                self._signal()
                self._buried = True
        code = self._process.wait()
        if self._exit_fd is not None:
            os.close(self._exit_fd)
            self._exit_fd = None
        return f"exited with code {code}" if code >= 0 else f"was killed by {_signal_name(-code)}"

    def _signal(self) -> None:
        # The child leads a session and group of its own; its id cannot belong to another before it is reaped.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _start(board: int, output: int) -> tuple[Connection, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fd = theirs.fileno()
        argv = [sys.executable, "-c", _BOOT, str(fd), str(board), str(os.getpid()), json.dumps(sys.path)]
        process = subprocess.Popen(
            argv,
            pass_fds=(fd, board),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        return Connection(os.dup(ours.fileno())), process


def _exit_fd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends, where the system has such."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _names(sources: Sequence[Source]) -> str:
    return "reward function " + ", ".join(s if isinstance(s, str) else getattr(s, "__name__", repr(s)) for s in sources)
