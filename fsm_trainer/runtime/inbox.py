"""Where completions, signals and failures wait for the loop thread, in the order they came."""

from __future__ import annotations

import queue
from typing import Protocol

from fsm_trainer.core.events import Input
from fsm_trainer.runtime.clock import Clock


class Inbox(Protocol):
    """Many writers, one reader: the event loop."""

    def put(self, event: Input) -> None:
        """Add an input; never blocks."""

    def get(self, deadline_ns: int | None) -> Input | None:
        """The next input; None once `deadline_ns` has come and none is there. No deadline: wait for ever."""


class ThreadInbox:
    """An inbox between threads. `put` may also be called in a signal handler."""

    def __init__(self, clock: Clock) -> None:
        """Deadlines are moments of `clock`."""
        self._clock = clock
        # SimpleQueue is the one queue whose put is reentrant, which a signal handler needs.
        self._events: queue.SimpleQueue[Input] = queue.SimpleQueue()

    def put(self, event: Input) -> None:
        """Add an input; never blocks."""
        self._events.put(event)

    def get(self, deadline_ns: int | None) -> Input | None:
        """The next input; None once `deadline_ns` has come and none is there."""
        try:
            if deadline_ns is None:
                return self._events.get()
            # An input that is there goes first, even when the deadline has passed: it may be what was waited for.
            left_s = (deadline_ns - self._clock.now_ns()) / 1e9
            return self._events.get(timeout=left_s) if left_s > 0 else self._events.get_nowait()
        except queue.Empty:
            return None
