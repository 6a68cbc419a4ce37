"""How a failure is told: its type, message, the user's line and the traceback, as text that can cross a process.

This module knows nothing of threads or processes.
"""

from __future__ import annotations

import signal
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

MAX_MESSAGE = 1000
"""Characters of a failure's message; its traceback has the rest."""

_PACKAGE = str(Path(__file__).resolve().parents[1])
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class Failure(NamedTuple):
    """An exception as text."""

    type: str
    message: str
    traceback: str
    """Empty where the message says it all: what this package refuses, or the system does."""
    where: str
    """`file.py:line` of the innermost frame in the user's own code, or else of the innermost frame."""

    @property
    def summary(self) -> str:
        """The message and where it comes from, in one line."""
        return f"{self.message} ({self.where})" if self.where else self.message

    @property
    def for_log(self) -> dict[str, str]:
        """The fields for people's log: its summary, and the traceback if there is one."""
        return {"message": self.summary, **({"exception": self.traceback} if self.traceback else {})}


class EngineError(RuntimeError):
    """A call to an engine raised; what it raised is here as text."""

    def __init__(self, type: str, message: str, traceback: str = "", where: str = "") -> None:
        """Take the parts of a `Failure`."""
        super().__init__(type, message, traceback, where)
        self.type = type
        self.message = message
        self.traceback = traceback
        self.where = where

    def __str__(self) -> str:
        """Type and message."""
        return f"{self.type}: {self.message}"


class EngineDied(RuntimeError):  # noqa: N818 - an event that befell the engine, like QueueClosed
    """The process of an engine ended unasked."""

    def __init__(self, name: str, pid: int, exit_code: int) -> None:
        """`exit_code` as subprocess gives it: negative for a signal."""
        super().__init__(name, pid, exit_code)
        self.name = name
        self.pid = pid
        self.exit_code = exit_code

    def __str__(self) -> str:
        """Who died of what."""
        how = f"exited with code {self.exit_code}" if self.exit_code >= 0 else f"was killed by {self._signal()}"
        return f"engine process {self.name} (pid {self.pid}) {how}"

    def _signal(self) -> str:
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:
            return f"signal {-self.exit_code}"


class HostClosed(RuntimeError):  # noqa: N818
    """The engine's host was closed before it could do the call."""


def describe(error: BaseException) -> Failure:
    """The failure that an exception stands for; one that crossed a process keeps its origin."""
    if isinstance(error, EngineError):
        return Failure(error.type, error.message, error.traceback, error.where)
    if isinstance(error, (EngineDied, HostClosed)):
        return Failure(type(error).__name__, _message(error), "", "")  # raised in no place that says more
    told = _is_told(error)
    text = "" if told else "".join(traceback.format_exception(type(error), error, error.__traceback__))
    where = _where(error.__traceback__)
    return Failure(type(error).__name__, _message(error), text, where)


def _is_told(error: BaseException) -> bool:
    """Whether it is a sentence for users, raised as such by this package, or the system's, as of a full disk."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or _is_users(frames[-1].filename):
        return False
    if isinstance(error, OSError) and error.errno is not None:
        return True
    meant = type(error) in (ValueError, FloatingPointError) or type(error).__module__.startswith("fsm_trainer.")
    raised = (frames[-1].line or "").startswith("raise ")
    return meant and raised and frames[-1].filename.startswith(_PACKAGE)


def _message(error: BaseException) -> str:
    """What it says, on one line of bounded length; a user's exception may fail even at that."""
    try:
        # Half a surrogate pair is no UTF-8, and the event log holds nothing else.
        said = (str(error) or repr(error)).encode("utf-8", "backslashreplace").decode()
        text = " ".join(said.split())
    except Exception as unsaid:
        text = f"(its message cannot be shown: {type(unsaid).__name__})"
    return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 3]}..."


def _where(trace: TracebackType | None) -> str:
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if _is_users(frame.filename)]
    for frame in reversed(own or frames):
        return f"{Path(frame.filename).name}:{frame.lineno}"
    return ""


def _is_users(filename: str) -> bool:
    """Whether code is neither ours nor Python's nor an installed package's."""
    return not filename.startswith((_PACKAGE, "<", *_INSTALLED))
