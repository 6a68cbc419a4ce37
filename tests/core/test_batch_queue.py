"""The pure queue: order, capacity, closing, errors."""

from __future__ import annotations

import pytest

from fsm_trainer.core.batch_queue import BoundedQueue, QueueClosed


def test_fifo_and_capacity() -> None:
    queue: BoundedQueue[str] = BoundedQueue(2)
    assert queue.offer("a")
    assert queue.offer("b")
    assert queue.full
    assert not queue.offer("c")
    assert queue.items() == ("a", "b")
    assert queue.take() == "a"
    assert queue.offer("c")
    assert [queue.take(), queue.take(), queue.take()] == ["b", "c", None]


def test_close_refuses_offers_and_gives_out_what_is_left() -> None:
    queue: BoundedQueue[str] = BoundedQueue(2)
    queue.offer("a")
    queue.close()
    queue.close()
    with pytest.raises(QueueClosed):
        queue.offer("b")
    assert queue.take() == "a"
    with pytest.raises(QueueClosed):
        queue.take()


def test_first_error_wins_and_reaches_every_later_operation() -> None:
    queue: BoundedQueue[str] = BoundedQueue(1)
    queue.offer("a")
    first = ValueError("first")
    queue.report_error(first)
    queue.report_error(KeyError("second"))
    assert queue.error is first
    for operation in (queue.take, lambda: queue.offer("b"), lambda: queue.remove("a")):
        with pytest.raises(ValueError, match="first"):
            operation()


def test_remove_takes_out_of_turn() -> None:
    queue: BoundedQueue[str] = BoundedQueue(3)
    for item in "abc":
        queue.offer(item)
    queue.remove("b")
    assert queue.items() == ("a", "c")
    with pytest.raises(ValueError, match="b"):
        queue.remove("b")


def test_no_room_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="maxsize is 0, expected at least 1"):
        BoundedQueue(0)
