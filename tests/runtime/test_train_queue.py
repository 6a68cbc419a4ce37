import threading
from collections.abc import Callable
from typing import Any

import pytest

from fsm_trainer.core.batch_queue import QueueClosed
from fsm_trainer.runtime.clock import VirtualClock
from fsm_trainer.runtime.train_queue import AsyncTrainBatchQueue


class Parked:
    """A `wait` that tells when somebody has begun to wait."""

    def __init__(self) -> None:
        self.seen = threading.Semaphore(0)
        self.limits: list[float | None] = []

    def __call__(self, condition: threading.Condition, timeout_s: float | None) -> bool:
        self.limits.append(timeout_s)
        # The lock is held, so nobody can notify before the wait has really begun.
        self.seen.release()
        return condition.wait(timeout_s)


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run `call`; its result or exception is appended to the list."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def queue_of(*items: Any, maxsize: int = 2, **options: Any) -> Any:
    queue: Any = AsyncTrainBatchQueue(maxsize, **options)
    for item in items:
        queue.put(item)
    return queue


def test_batches_come_out_in_the_order_they_went_in() -> None:
    queue = queue_of("a", "b", "c", maxsize=3)
    assert queue.qsize() == 3
    assert [queue.get() for _ in range(3)] == ["a", "b", "c"]
    assert queue.qsize() == 0


def test_a_full_queue_parks_the_producer_until_a_batch_is_taken() -> None:
    parked = Parked()
    queue = queue_of("a", "b", wait=parked)
    thread, results = in_thread(lambda: queue.put("c"))
    parked.seen.acquire()
    assert (queue.qsize(), results) == (2, [])
    assert queue.get() == "a"
    thread.join()
    assert results == [None]
    assert [queue.get(), queue.get()] == ["b", "c"]


def test_an_empty_queue_parks_the_consumer_until_a_batch_comes() -> None:
    parked = Parked()
    queue = queue_of(wait=parked)
    thread, results = in_thread(queue.get)
    parked.seen.acquire()
    assert results == []
    queue.put("a")
    thread.join()
    assert results == ["a"]


def test_a_producer_that_waits_too_long_names_the_consumer() -> None:
    queue = queue_of("a", "b", timeout_s=0.01)
    with pytest.raises(TimeoutError) as caught:
        queue.put("c")
    assert str(caught.value) == (
        "producer waited 0.01 s for a free slot in the train queue (2 of 2 taken) since the consumer did not take any"
    )
    assert queue.qsize() == 2


def test_a_consumer_that_waits_too_long_names_the_producer() -> None:
    with pytest.raises(TimeoutError, match=r"consumer waited 0.02 s for a batch .*since no producer put one"):
        queue_of(timeout_s=9).get(timeout_s=0.02)


def test_the_time_waited_is_the_clocks() -> None:
    clock = VirtualClock()

    def wait(condition: threading.Condition, timeout_s: float | None) -> bool:
        assert timeout_s is not None
        limits.append(timeout_s)
        clock.advance_to(clock.now_ns() + 400_000_000)
        return True  # woken for nothing: somebody else was faster

    limits: list[float] = []
    with pytest.raises(TimeoutError):
        queue_of(timeout_s=1, clock=clock, wait=wait).get()
    assert limits == pytest.approx([1.0, 0.6, 0.2])


def test_no_limit_is_waited_for_without_one() -> None:
    parked = Parked()
    queue = queue_of(wait=parked)
    thread, _ = in_thread(queue.get)
    parked.seen.acquire()
    queue.put("a")
    thread.join()
    assert parked.limits == [None]


def test_zero_seconds_do_not_wait() -> None:
    def wait(condition: threading.Condition, timeout_s: float | None) -> bool:
        raise AssertionError("it waited")

    with pytest.raises(TimeoutError):
        queue_of(wait=wait).get(timeout_s=0)


@pytest.mark.parametrize("waiter", ["producer", "consumer"])
def test_close_releases_whoever_waits(waiter: str) -> None:
    parked = Parked()
    queue = queue_of("a", maxsize=1, wait=parked) if waiter == "producer" else queue_of(wait=parked)
    calls = [in_thread((lambda: queue.put("b")) if waiter == "producer" else queue.get) for _ in range(3)]
    for _ in calls:
        parked.seen.acquire()
    queue.close()
    for thread, results in calls:
        thread.join()
        assert isinstance(results[0], QueueClosed)
    assert queue.closed


def test_a_closed_queue_gives_out_what_it_holds_and_takes_nothing() -> None:
    queue = queue_of("a", "b")
    queue.close()
    with pytest.raises(QueueClosed):
        queue.put("c")
    assert [queue.get(), queue.get()] == ["a", "b"]
    with pytest.raises(QueueClosed):
        queue.get()


def test_the_first_error_is_kept_and_reaches_everyone() -> None:
    parked = Parked()
    queue = queue_of("a", maxsize=1, wait=parked)
    thread, results = in_thread(lambda: queue.put("b"))
    parked.seen.acquire()
    first, second = RuntimeError("first"), RuntimeError("second")
    queue.report_error(first)
    queue.report_error(second)
    thread.join()
    assert results == [first]
    assert queue.error is first
    for call in (queue.get, lambda: queue.put("c")):
        with pytest.raises(RuntimeError, match="first"):
            call()


def test_many_producers_and_consumers_lose_and_double_nothing() -> None:
    queue = queue_of(maxsize=2)
    barrier = threading.Barrier(6)

    def produce(first: int) -> None:
        barrier.wait()
        for item in range(first, first + 200):
            queue.put(item)

    def consume() -> list[int]:
        barrier.wait()
        return [queue.get() for _ in range(200)]

    producers = [in_thread(lambda first=first: produce(first)) for first in (1, 1001, 2001)]
    consumers = [in_thread(consume) for _ in range(3)]
    for thread, _ in (*producers, *consumers):
        thread.join()
    taken = [results[0] for _, results in consumers]
    assert sorted(item for items in taken for item in items) == [n for f in (1, 1001, 2001) for n in range(f, f + 200)]
    for items in taken:  # what one producer put reaches one consumer in order
        for first in (1, 1001, 2001):
            own = [item for item in items if first <= item < first + 200]
            assert own == sorted(own)


@pytest.mark.parametrize("timeout_s", [-1, float("nan")])
def test_an_impossible_timeout_is_refused(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        AsyncTrainBatchQueue(1, timeout_s=timeout_s)
    with pytest.raises(ValueError, match="timeout_s"):
        queue_of().get(timeout_s=timeout_s)


def test_none_is_refused() -> None:
    queue = queue_of()
    with pytest.raises(ValueError, match="got None"):
        queue.put(None)  # type: ignore[arg-type]
    assert queue.qsize() == 0
