"""Weights loaded while an engine generates, in virtual time: how long its generations pause, and what they use."""

from __future__ import annotations

from typing import NamedTuple

from fsm_trainer.core.events import Command


class _Load(NamedTuple):
    op: int
    start_ns: int
    end_ns: int
    version: int | None
    """None: it does not succeed."""


class Loads:
    """The loads of all engines, those of each in the order of time."""

    def __init__(self) -> None:
        """None yet."""
        self._of: dict[int | None, list[_Load]] = {}

    def begin(self, command: Command, start_ns: int, duration_ns: int, *, succeeds: bool) -> None:
        """An engine begins a load that takes so long."""
        version = command.version if succeeds else None
        self._of.setdefault(command.engine, []).append(_Load(command.op, start_ns, start_ns + duration_ns, version))

    def forget(self, command: Command) -> None:
        """A load ended early: it pauses nothing any more."""
        self._of[command.engine] = [load for load in self._of.get(command.engine, ()) if load.op != command.op]

    def paused_ns(self, engine: int | None, start_ns: int, end_ns: int) -> int:
        """Nanoseconds between two moments in which the engine loaded and its generations stood still."""
        paused = 0
        for load in reversed(self._of.get(engine, ())):
            if load.end_ns <= start_ns:
                break
            paused += max(0, min(load.end_ns, end_ns) - max(load.start_ns, start_ns))
        return paused

    def version_at(self, engine: int | None, moment_ns: int, at_least: int) -> int:
        """Version that the engine generates with at that moment."""
        done = (x for x in reversed(self._of.get(engine, ())) if x.end_ns <= moment_ns and x.version is not None)
        newest = next(done, None)
        return at_least if newest is None or newest.version is None else max(at_least, newest.version)
