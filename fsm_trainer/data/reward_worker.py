"""The process in which users' reward functions run; `reward_process.py` starts it and speaks to it.

A fresh interpreter that imports only what the functions need. They run in its main thread, where signal timers work.
What a call leaves behind (another working directory, a timer, a forked copy of this process) is tidied up after it.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fsm_trainer.data.reward_batch import RewardFailure, Value
from fsm_trainer.data.reward_board import SharedBoard, score_part
from fsm_trainer.data.reward_contracts import RewardFunction, failure_of
from fsm_trainer.data.reward_specs import Source, load_functions
from fsm_trainer.data.rewards import REWARD_FUNCTION
from fsm_trainer.data.user_code import UserCodeError, split_spec
from fsm_trainer.runtime.child import die_with

DONE = b""
"""The answer to a part; what comes before it are its failures."""


def main(fd: int, board_fd: int, parent: int) -> None:
    """Serve the parent over the socket `fd` until it is gone or says goodbye."""
    die_with(parent)
    # A terminal's Ctrl-C and a job manager's SIGTERM may reach every process; when to end is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    faulthandler.enable()  # what a segfault was doing is then in the log of what the functions print
    for inherited in (fd, board_fd):
        os.set_inheritable(inherited, False)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)
    connection = Connection(fd)
    try:
        sources: list[Source] = pickle.loads(connection.recv_bytes())
        _keep_importable(sources)
        functions = load_functions(sources)
    except BaseException as error:
        connection.send_bytes(pickle.dumps((isinstance(error, UserCodeError), failure_of(error))))
        _leave()
        return
    connection.send_bytes(pickle.dumps([function.info for function in functions]))
    _serve(connection, _TidyBoard(board_fd, connection), functions)


def _keep_importable(sources: Sequence[Source]) -> None:
    """What lies beside a user's file may be imported by a call, too, not only when the file is loaded."""
    for source in sources:
        if isinstance(source, str) and (path := split_spec(source, REWARD_FUNCTION)[0]).is_file():
            sys.path.append(str(Path(path).resolve().parent))


def _serve(connection: Connection, board: _TidyBoard, functions: Sequence[RewardFunction]) -> None:
    while True:
        try:
            number, limit_s, size = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return _leave()
        if number is None:
            return _leave()
        try:
            batch = pickle.loads(board.read_part(size))
        except Exception as error:  # whatever a row's own unpickling raises
            connection.send_bytes(pickle.dumps((None, failure_of(error))))
        else:
            score_part(functions[number], batch, board, limit_s)
        connection.send_bytes(DONE)


def _leave() -> None:
    """End at once: threads that a function left running must not hold the process."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


class _TidyBoard(SharedBoard):
    """Sends failures as they come, and restores after each call what the process needs."""

    def __init__(self, fd: int, connection: Connection) -> None:
        super().__init__(fd)
        self._connection = connection
        self._pid, self._folder = os.getpid(), os.getcwd()

    def end(self) -> None:
        """The call has ended; whatever it left is undone."""
        if os.getpid() != self._pid:
            os._exit(0)  # the call forked, and its copy of this process came back too
        signal.setitimer(signal.ITIMER_REAL, 0)
        super().end()
        if _folder() != self._folder:
            os.chdir(self._folder)

    def put(self, index: int, value: Value) -> None:
        """Keep the value where the parent sees it."""
        if isinstance(value, RewardFailure):
            self._connection.send_bytes(pickle.dumps((index, value)))
        super().put(index, value)


def _folder() -> Any:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None
