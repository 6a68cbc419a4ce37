"""Where time comes from. Nothing else in the package asks the operating system for the time of a run."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Nanoseconds since the run began."""

    def now_ns(self) -> int:
        """The present moment; never decreases."""


class MonotonicClock:
    """Real time since this clock was made."""

    def __init__(self) -> None:
        """Begin at 0."""
        self._origin = time.monotonic_ns()

    def now_ns(self) -> int:
        """Nanoseconds since the clock was made."""
        return time.monotonic_ns() - self._origin


class VirtualClock:
    """Time that stands still until it is moved, for tests and simulation."""

    def __init__(self, start_ns: int = 0) -> None:
        """Begin at `start_ns`."""
        self._now_ns = start_ns

    def now_ns(self) -> int:
        """The moment it was last moved to."""
        return self._now_ns

    def advance_to(self, t_ns: int) -> None:
        """Move to `t_ns`; ValueError if that lies in the past."""
        if t_ns < self._now_ns:
            raise ValueError(f"cannot move the clock back from {self._now_ns} to {t_ns} ns: pass a later moment")
        self._now_ns = t_ns
