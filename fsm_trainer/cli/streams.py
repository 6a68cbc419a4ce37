"""Standard streams that cannot break a run: closed ones, and readers that go away (`| head`, a terminal that is shut).

What is printed is for people; a run goes on without them. Knows nothing of what is printed.
"""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO, cast


def guard_streams() -> None:
    """Make standard output and error survive whatever happens to their other end. Calling again does nothing."""
    open_closed_streams()
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if not isinstance(stream, GuardedStream) and _file_number(stream) == number:
            setattr(sys, name, GuardedStream(stream))


def open_closed_streams() -> None:
    """Open the null device for each closed standard stream, before some other file gets its number and its output."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, and all below are taken.
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # What Python gives for a stream that was closed when it started.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open as long as the process


def _file_number(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


class GuardedStream:
    """A text stream that falls silent, instead of raising, once nobody can be written to any more."""

    def __init__(self, stream: TextIO) -> None:
        """`stream` has a file of its own."""
        self._stream = stream
        self._number = stream.fileno()

    def write(self, text: str) -> int:
        """Write, if that is still possible."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            # A terminal without UTF-8: better an escape than an end.
            encoding = self._stream.encoding or "ascii"
            return self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except (OSError, ValueError):
            self._fall_silent()
            return len(text)

    def flush(self) -> None:
        """Flush, if that is still possible."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._fall_silent()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the stream's own."""
        return getattr(self._stream, name)

    def _fall_silent(self) -> None:
        """Put the null device in the file's place, so that what is buffered, native code and Python's exit find it."""
        null = os.open(os.devnull, os.O_WRONLY)
        if null != self._number:
            os.dup2(null, self._number)
            os.close(null)
        if self._stream.closed:
            self._stream = cast("TextIO", open(self._number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
