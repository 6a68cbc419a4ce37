"""What can go wrong in a simulated run, as data: faults of operations, of their completions' way, and unasked inputs.

A plan is a flat list of parts, so that one of them can be taken away. It knows nothing of how the world carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from fsm_trainer.core.events import CommandKind, Input, InputKind
from fsm_trainer.engines.fake_behaviour import Effect, Fault

OTHER_KIND = -1
"""As the `op` of a happening: some operation in flight of which its event is no completion."""


class Delivery(str, Enum):
    """What befalls a completion on its way to the loop."""

    HELD = "held"
    """It comes only when nothing else can happen any more."""
    LATE = "late"
    """It comes `delay_s` later than it should, even if the operation is aborted meanwhile."""
    TWICE = "twice"
    """It comes again, `delay_s` after the first time."""


@dataclass(frozen=True)
class Disturbance:
    """Befalls the completion of the `nth` command (from 1) of a kind."""

    kind: CommandKind
    delivery: Delivery
    nth: int
    delay_s: float = 0.0


@dataclass(frozen=True)
class Happening:
    """An input that nothing asked for, which comes as the `at_input`th of the run (BEGIN is number 0)."""

    at_input: int
    event: Input


@dataclass(frozen=True)
class LogFault:
    """The event log takes no row from this seq on, as on a full disk."""

    at_seq: int


Part = Fault | Disturbance | Happening | LogFault


@dataclass(frozen=True)
class FaultPlan:
    """Everything that goes wrong in one run."""

    parts: tuple[Part, ...] = ()
    heal_at: int | None = None
    """From this input on nothing goes wrong any more, and what hung goes on; likewise as soon as all stands still."""

    @property
    def operations(self) -> tuple[Fault, ...]:
        """Faults of operations."""
        return tuple(part for part in self.parts if isinstance(part, Fault))

    @property
    def disturbances(self) -> dict[tuple[CommandKind, int], Disturbance]:
        """Disturbances by kind and number of the command."""
        return {(part.kind, part.nth): part for part in self.parts if isinstance(part, Disturbance)}

    @property
    def happenings(self) -> dict[int, tuple[Input, ...]]:
        """Unasked inputs by the number of the input that each comes as."""
        found: dict[int, tuple[Input, ...]] = {}
        for part in self.parts:
            if isinstance(part, Happening):
                found[part.at_input] = (*found.get(part.at_input, ()), part.event)
        return found

    @property
    def log_fails_at(self) -> int | None:
        """First row that cannot be logged."""
        return min((part.at_seq for part in self.parts if isinstance(part, LogFault)), default=None)

    @property
    def harmless(self) -> bool:
        """Whether a run without deadlines must reach its end in spite of it all."""
        return all(map(_harmless, self.parts)) and (self.heal_at is not None or not self._hangs())

    @property
    def stops(self) -> int:
        """How often the run is asked to stop."""
        return sum(isinstance(part, Happening) and part.event.kind is InputKind.STOP for part in self.parts)

    def without(self, index: int) -> FaultPlan:
        """The plan less one part."""
        return replace(self, parts=self.parts[:index] + self.parts[index + 1 :])

    def _hangs(self) -> bool:
        return any(fault.effect is Effect.HANG for fault in self.operations)


NO_FAULTS = FaultPlan()
_HARMLESS_EFFECTS = (Effect.HANG, Effect.NO_STEP, Effect.DEGENERATE)


def _harmless(part: Part) -> bool:
    if isinstance(part, Fault):
        return part.effect in _HARMLESS_EFFECTS
    if isinstance(part, Happening):
        return part.event.kind not in (InputKind.ENGINE_DIED, InputKind.FAILED) or part.event.op is not None
    return isinstance(part, Disturbance)
