"""Daemon threads: one that does jobs in the order they were posted, many that do them side by side, and how briskly
threads take turns.

It knows nothing of what the jobs do.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

SWITCH_INTERVAL_S = 0.0002
"""How long a thread may keep the interpreter from another one. At Python's default of 5 ms, a train step, which lets go
of it at every tensor operation, waits for the reward's thread again and again (docs/performance.md)."""


@contextmanager
def brisk_switching() -> Iterator[None]:
    """Let threads take turns at least every `SWITCH_INTERVAL_S` inside."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_INTERVAL_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class LaneThread:
    """Jobs never overlap on one lane. A daemon, so that a hung job cannot keep the process alive."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self.name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._open_jobs = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, job: Callable[[], None]) -> None:
        """Queue a job; it must not raise."""
        with self._lock:
            self._open_jobs += 1
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread after the jobs posted so far."""
        self._jobs.put(None)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread's end; whether it came in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def busy(self) -> bool:
        """Whether a posted job is not finished."""
        with self._lock:
            return self._open_jobs > 0

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            finally:
                with self._lock:
                    self._open_jobs -= 1
            # A finished job must not keep its batch alive until the next one comes.
            del job


class CallThreads:
    """Jobs that overlap: each on a thread that has nothing else to do, a new one where all are busy.

    They are handed out in the order they were posted. Daemons, so that a hung job cannot keep the process alive.
    """

    def __init__(self, name: str) -> None:
        """Start no thread before a job comes."""
        self.name = name
        self._ended = False
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._open_jobs = 0

    def post(self, job: Callable[[], None]) -> None:
        """Begin a job, unless the threads were told to end; it must not raise."""
        with self._changed:
            if self._ended:
                return
            self._open_jobs += 1
            if self._idle:
                self._idle -= 1
            else:
                thread = threading.Thread(target=self._run, name=f"{self.name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._jobs.put(job)

    def finish(self) -> None:
        """Wait until every job is done, then end the threads."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open_jobs)
        self.end()
        for thread in self._threads:
            thread.join()

    def end(self) -> None:
        """Let each thread end after its present job; what is posted from now on is not begun."""
        with self._changed:
            if not self._ended:
                self._ended = True
                for _ in self._threads:
                    self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """After `end`: whether every thread has ended within the time."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            finally:
                del job
                with self._changed:
                    self._open_jobs -= 1
                    self._idle += 1
                    self._changed.notify_all()
