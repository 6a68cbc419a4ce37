"""A clock for real runs whose deadlines come when a test says so, however fast or slow the machine is."""

from __future__ import annotations

from collections.abc import Callable

from fsm_trainer.core.events import Input, InputKind
from fsm_trainer.runtime.clock import MonotonicClock


class JumpingClock(MonotonicClock):
    """Real time, with a jump ahead where a test wants a limit to have passed that is too long to be met by itself."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead_ns = 0

    def now_ns(self) -> int:
        return super().now_ns() + self._ahead_ns

    def jump(self, seconds: float, post: Callable[[Input], None]) -> None:
        """Let so much time have passed, and have the loop look at it."""
        self._ahead_ns += int(seconds * 1e9)
        post(Input(InputKind.TICK))
