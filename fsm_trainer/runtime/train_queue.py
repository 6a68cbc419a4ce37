"""The thread-safe face of the bounded train queue, for producers outside the scheduler.

The rule itself (order, capacity, close, first error) is `core.batch_queue.BoundedQueue`; this module adds only the
lock and the waiting. It knows nothing of what a batch holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from fsm_trainer.core.batch import AsyncTrainBatch
from fsm_trainer.core.batch_queue import BoundedQueue
from fsm_trainer.core.config import SECOND_NS
from fsm_trainer.runtime.clock import Clock, MonotonicClock

T = TypeVar("T")
Wait = Callable[[threading.Condition, "float | None"], bool]
"""Waits on a held condition for at most so many seconds; False when the time is over."""


class AsyncTrainBatchQueue:
    """FIFO of at most `maxsize` batches between threads.

    A full queue parks the producer and an empty one the consumer, for at most `timeout_s` seconds (None: for ever);
    then TimeoutError names who did not do its part. `close` releases everyone with QueueClosed, though what the queue
    still holds can be taken; the first reported error is kept and raised by every later `put` and `get`.
    """

    def __init__(
        self,
        maxsize: int,
        *,
        timeout_s: float | None = None,
        clock: Clock | None = None,
        wait: Wait = threading.Condition.wait,
    ) -> None:
        """Make an empty queue; `clock` and `wait` are where time comes from, replaced in tests."""
        self._queue: BoundedQueue[AsyncTrainBatch] = BoundedQueue(maxsize)
        self._timeout_s = _checked(timeout_s)
        self._clock = clock or MonotonicClock()
        self._wait = wait
        self._lock = threading.Lock()
        self._not_full = threading.Condition(self._lock)
        self._not_empty = threading.Condition(self._lock)

    def put(self, batch: AsyncTrainBatch, *, timeout_s: float | None = None) -> None:
        """Append a batch, waiting for a free slot for `timeout_s` seconds (None: the queue's own limit)."""
        if batch is None:  # the sign of an empty queue, so the consumer would wait on
            raise ValueError("put got None, expected an AsyncTrainBatch; close the queue to say that there are no more")
        with self._not_full:
            self._until(lambda: self._queue.offer(batch) or None, self._not_full, timeout_s, self._no_slot)
            self._not_empty.notify()

    def get(self, *, timeout_s: float | None = None) -> AsyncTrainBatch:
        """Take the oldest batch, waiting for one for `timeout_s` seconds (None: the queue's own limit)."""
        with self._not_empty:
            batch = self._until(self._queue.take, self._not_empty, timeout_s, self._no_batch)
            self._not_full.notify()
        return batch

    def close(self) -> None:
        """Refuse further batches and release every waiting thread. Idempotent."""
        with self._lock:
            self._queue.close()
            self._release()

    def report_error(self, error: BaseException) -> None:
        """Keep the first error; it reaches every waiting and every later `put` and `get`."""
        with self._lock:
            self._queue.report_error(error)
            self._release()

    def qsize(self) -> int:
        """Batches held now."""
        with self._lock:
            return len(self._queue)

    @property
    def maxsize(self) -> int:
        """Most batches it holds."""
        return self._queue.maxsize

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        with self._lock:
            return self._queue.closed

    @property
    def error(self) -> BaseException | None:
        """The first error reported, if any."""
        with self._lock:
            return self._queue.error

    def _release(self) -> None:
        self._not_full.notify_all()
        self._not_empty.notify_all()

    def _until(
        self,
        attempt: Callable[[], T | None],
        changed: threading.Condition,
        timeout_s: float | None,
        blame: Callable[[float], str],
    ) -> T:
        """Attempt until it gives something, waiting in between; the lock is held whenever `attempt` runs."""
        limit_s = self._timeout_s if timeout_s is None else _checked(timeout_s)
        start_ns = self._clock.now_ns()
        while (result := attempt()) is None:
            left_s = None if limit_s is None else limit_s - (self._clock.now_ns() - start_ns) / SECOND_NS
            if limit_s is not None and left_s is not None and left_s <= 0:
                raise TimeoutError(blame(limit_s))
            self._wait(changed, left_s)
        return result

    def _no_slot(self, limit_s: float) -> str:
        return (
            f"producer waited {limit_s:g} s for a free slot in the train queue ({len(self._queue)} of {self.maxsize} "
            f"taken) since the consumer did not take any"
        )

    def _no_batch(self, limit_s: float) -> str:
        return (
            f"consumer waited {limit_s:g} s for a batch in the train queue (0 of {self.maxsize} taken) since no "
            f"producer put one"
        )


def _checked(timeout_s: float | None) -> float | None:
    if timeout_s is not None and not timeout_s >= 0:
        raise ValueError(f"timeout_s is {timeout_s}, expected at least 0, or None for no limit")
    return timeout_s
