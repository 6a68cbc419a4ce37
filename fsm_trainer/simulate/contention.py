"""Rewards that hold up the train step: what threads of one interpreter cost each other.

A train step on the CPU lets go of the interpreter at every tensor operation. While another thread of its process scores
a batch it gets the interpreter back only in between, so as long as the scoring keeps a processor busy the step all but
stands still, and the scoring is hardly slower for it (docs/what-if.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

from fsm_trainer.core.events import Command, CommandKind

Stretch = tuple[int, int, float]
"""From, to (nanoseconds), and the share of it that holds up a train step."""


def lost_ns(start: int, end: int, stretches: Iterable[Stretch]) -> int:
    """Nanoseconds between two moments in which a train step stood still."""
    return round(sum(share * max(0, min(end, until) - max(start, since)) for since, until, share in stretches))


class Interpreter:
    """What is scored in the trainer's process, in virtual time."""

    def __init__(self, share: Callable[[Command], float]) -> None:
        """`share` of a reward's time holds up the train step beside it."""
        self._share = share
        self._scoring: dict[int, tuple[int, float]] = {}
        self._scored: list[Stretch] = []

    def begin(self, command: Command, at_ns: int) -> None:
        """An operation begins at that moment."""
        if command.kind is CommandKind.REWARD:
            self._scoring[command.op] = (at_ns, self._share(command))
        elif command.kind is CommandKind.TRAIN:
            self._scored.clear()

    def end(self, command: Command, at_ns: int) -> None:
        """An operation has ended."""
        if command.kind is CommandKind.REWARD:
            since, share = self._scoring.pop(command.op)
            self._scored.append((since, at_ns, share))

    def lost_ns(self, start: int, end: int) -> int:
        """Nanoseconds that a train step lost since it began."""
        running = ((since, end, share) for since, share in self._scoring.values())
        return lost_ns(start, end, (*self._scored, *running))


class Stretches:
    """Everything that was scored in a run."""

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        """In any order."""
        self._sorted = sorted(stretches)
        self._longest = max((until - since for since, until, _ in self._sorted), default=0)

    def lost_ns(self, start: int, end: int) -> int:
        """Nanoseconds that a train step between these moments lost."""
        low = bisect_left(self._sorted, (start - self._longest,))
        high = bisect_left(self._sorted, (end,))
        return lost_ns(start, end, self._sorted[low:high])
