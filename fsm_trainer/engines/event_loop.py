"""An asyncio event loop on a thread of its own, for what other threads wait for.

Knows nothing of what is done on it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoopThread:
    """A daemon that nothing waits for unless it is closed: a process ends whatever hangs there.

    Not anyio's portal, since that is a generator: left open, its clean-up as the interpreter ends waits for a thread
    which is no more.
    """

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name=name, daemon=True)
        self._thread.start()
        self._loop, self._over = self._begun.result()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin it; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what still runs and end the thread; waits for both."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self) -> None:
        over = asyncio.Event()
        self._begun.set_result((asyncio.get_running_loop(), over))
        await over.wait()
