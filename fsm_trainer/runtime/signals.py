"""Turns SIGINT, SIGTERM and SIGHUP into STOP inputs. What a stop means is the scheduler's to decide."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from fsm_trainer.core.events import Input, InputKind

_REASONS = {signal.SIGINT: "sigint", signal.SIGTERM: "sigterm", signal.SIGHUP: "sighup"}
_PATIENCE = 3
"""The SIGINT that is no longer turned into an input."""


@contextmanager
def stop_signals(post: Callable[[Input], None]) -> Iterator[None]:
    """Post a STOP for each SIGINT, SIGTERM and SIGHUP while inside; a no-op outside the main thread.

    A SIGHUP that is ignored stays so: that is what `nohup` is for.

    From the third SIGINT on, Python's default behaviour (KeyboardInterrupt) is back, for a person who will not wait.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if number == signal.SIGINT and interrupts >= _PATIENCE:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.default_int_handler(number, frame)
        post(Input(InputKind.STOP, reason=_REASONS[signal.Signals(number)]))

    kept = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    before = {number: signal.signal(number, handle) for number in _REASONS if number not in kept}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: the handler was not set from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
