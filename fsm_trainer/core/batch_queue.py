"""The bounded first-in-first-out train queue, as a pure data structure.

One rule, two faces: the scheduler uses this class directly; `runtime.train_queue.AsyncTrainBatchQueue` adds locks and
blocking for producers outside the scheduler. It knows nothing of threads or time.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class QueueClosed(Exception):  # noqa: N818 - the name users know, like queue.Empty
    """The queue was closed: it takes nothing more, and everything it held has been taken."""


class BoundedQueue(Generic[T]):
    """FIFO of at most `maxsize` items.

    A reported error is kept (the first one wins) and raised by every later operation. A closed queue refuses offers at
    once and still gives out what it holds, so that closing loses nothing.
    """

    def __init__(self, maxsize: int) -> None:
        """Make an empty queue; ValueError if `maxsize` is below 1."""
        if maxsize < 1:
            raise ValueError(f"maxsize is {maxsize}, expected at least 1")
        self.maxsize = maxsize
        self._items: deque[T] = deque()
        self._closed = False
        self._error: BaseException | None = None

    def __len__(self) -> int:
        """Items held."""
        return len(self._items)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def error(self) -> BaseException | None:
        """The first error reported, if any."""
        return self._error

    @property
    def full(self) -> bool:
        """Whether an offer would be refused."""
        return len(self._items) >= self.maxsize

    def items(self) -> tuple[T, ...]:
        """What it holds, oldest first."""
        return tuple(self._items)

    def offer(self, item: T) -> bool:
        """Append `item`; False if full. Raises QueueClosed after `close`, or the kept error."""
        self._raise_error()
        if self._closed:
            raise QueueClosed("the train queue is closed")
        if self.full:
            return False
        self._items.append(item)
        return True

    def take(self) -> T | None:
        """Remove and return the oldest item; None if empty. Raises QueueClosed if closed and empty, or the error."""
        self._raise_error()
        if self._items:
            return self._items.popleft()
        if self._closed:
            raise QueueClosed("the train queue is closed")
        return None

    def remove(self, item: T) -> None:
        """Remove one item wherever it stands; ValueError if it is not held."""
        self._raise_error()
        self._items.remove(item)

    def drain(self) -> tuple[T, ...]:
        """Remove and return everything, whatever the queue's state."""
        items = tuple(self._items)
        self._items.clear()
        return items

    def close(self) -> None:
        """Refuse further offers. Idempotent."""
        self._closed = True

    def report_error(self, error: BaseException) -> None:
        """Keep the first error; every later operation raises it."""
        if self._error is None:
            self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
