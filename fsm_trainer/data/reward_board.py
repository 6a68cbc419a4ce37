"""Where a running part's calls and values are noted: which call runs since when, and every value as it comes.

`ListBoard` is for the same process. `SharedBoard` is memory that a reward process and its parent both see, so that
what was scored, and which call was at fault, is known after the process has died.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable
from typing import Protocol

from fsm_trainer.data.reward_batch import RewardBatch, RewardFailure, Value
from fsm_trainer.data.reward_contracts import RewardFunction, failure_of

CAPACITY = 16384
"""Completions in one part at most."""
_HEAD = 64
_VALUES = _HEAD + CAPACITY
_SIZE = _VALUES + 8 * CAPACITY
# From there on: the part being scored, pickled.
_OPEN, _NUMBER, _NOT_SCORABLE, _FAILED = range(4)


class Board(Protocol):
    """What `score_part` writes to."""

    def begin(self, start: int, stop: int) -> None:
        """A call for these completions begins; may raise to stop."""

    def end(self) -> None:
        """It has ended, however."""

    def put(self, index: int, value: Value) -> None:
        """A completion's value."""


def score_part(
    function: RewardFunction,
    batch: RewardBatch,
    board: Board,
    limit_s: float | None = None,
    *,
    first_failure_ends: bool = False,
) -> None:
    """Call a function for a whole batch; whatever its calls raise becomes the value of their completions."""
    for start, stop, call in function.calls(batch, limit_s):
        board.begin(start, stop)
        try:
            values = call()
        except BaseException as error:  # SystemExit too: it is the user's code, not this process, that wants to end
            values = [failure_of(error)] * (stop - start)
        board.end()
        for index, value in enumerate(values, start):
            board.put(index, value)
        if first_failure_ends and any(isinstance(value, RewardFailure) for value in values):
            return


class ListBoard:
    """Values in a list; `check` is called before each call."""

    def __init__(self, count: int, check: Callable[[], None]) -> None:
        self.values: list[Value] = [None] * count
        self._check = check

    def begin(self, start: int, stop: int) -> None:
        """May raise."""
        self._check()

    def end(self) -> None:
        """Nothing to note."""

    def put(self, index: int, value: Value) -> None:
        """Keep it."""
        self.values[index] = value


class SharedBoard:
    """A piece of memory: the reward process writes calls and values, its parent reads them and writes the parts."""

    def __init__(self, fd: int) -> None:
        """Take over the descriptor."""
        self._fd = fd
        self._memory = mmap.mmap(fd, _SIZE)
        self._view = memoryview(self._memory)
        self._head = self._view[:_HEAD].cast("q")
        self._states = self._view[_HEAD:_VALUES]
        self._numbers = self._view[_VALUES:].cast("d")

    def write_part(self, body: bytes) -> None:
        """Put a pickled part where the child reads it; through a socket a large one would go in small pieces."""
        os.pwrite(self._fd, body, _SIZE)

    def read_part(self, size: int) -> bytes:
        """What `write_part` wrote."""
        return os.pread(self._fd, size, _SIZE)

    def clear(self, count: int) -> None:
        """Before a part of `count` completions is sent."""
        self._head[0] = self._head[1] = self._head[2] = 0
        self._states[:count] = bytes(count)

    def begin(self, start: int, stop: int) -> None:
        """Note the call; its time last, which the parent reads first."""
        self._head[0], self._head[1] = start, stop
        self._head[2] = time.monotonic_ns()

    def end(self) -> None:
        """No call runs."""
        self._head[2] = 0

    def put(self, index: int, value: Value) -> None:
        """A failure's text goes another way; here it only counts as told."""
        if isinstance(value, RewardFailure):
            self._states[index] = _FAILED
            return
        self._numbers[index] = math.nan if value is None else value
        self._states[index] = _NOT_SCORABLE if value is None else _NUMBER

    @property
    def call_began_ns(self) -> int:
        """When the running call began, by the machine's monotonic clock; 0 if none runs."""
        return self._head[2]

    def open_call(self) -> range:
        """The completions of the call that runs, or ran when the writer died."""
        return range(self._head[0], self._head[1]) if self._head[2] else range(0)

    def read(self, count: int) -> list[tuple[int, Value]]:
        """Indexes and values so far, without the failures."""
        told = (_NUMBER, _NOT_SCORABLE)
        return [
            (i, self._numbers[i] if self._states[i] == _NUMBER else None)
            for i in range(count)
            if self._states[i] in told
        ]

    def untold(self, count: int) -> list[int]:
        """Completions without any value."""
        return [i for i in range(count) if self._states[i] == _OPEN]

    def close(self) -> None:
        """Give the memory back; once more does nothing."""
        if self._fd < 0:
            return
        for view in (self._head, self._states, self._numbers, self._view):
            view.release()
        self._memory.close()
        os.close(self._fd)
        self._fd = -1


def board_file() -> int:
    """The descriptor of memory for a `SharedBoard`, to hand to a child."""
    fd = os.memfd_create("fsm-rewards")
    os.ftruncate(fd, _SIZE)
    return fd
