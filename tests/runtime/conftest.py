"""Every test of the runtime must leave neither a thread nor a process behind."""

import threading
from collections.abc import Iterator

import psutil
import pytest


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Compare the threads and child processes before and after."""
    threads = set(threading.enumerate())
    children = set(psutil.Process().children(recursive=True))
    yield
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)  # one that is about to end may do so; one that hangs is a leak
    assert set(threading.enumerate()) - threads == set()
    assert set(psutil.Process().children(recursive=True)) - children == set()
