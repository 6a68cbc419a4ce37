"""What a fake engine does: programmable durations, token counts and faults, the same for real and virtual time.

An outcome follows from the seed and from what the command is about (its kind, batch, version, engine), not from the
order of calls, so two runs under different schedules meet the same world. It knows nothing of threads or clocks.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

from fsm_trainer.core.events import Command, CommandKind, Input, InputKind


class Distribution(Protocol):
    """A random amount."""

    def draw(self, rng: random.Random) -> float:
        """One value."""


@dataclass(frozen=True)
class Uniform:
    """Evenly between `low` and `high`."""

    low: float
    high: float

    def draw(self, rng: random.Random) -> float:
        """One value."""
        return rng.uniform(self.low, self.high)


@dataclass(frozen=True)
class Lognormal:
    """The logarithm is normal with mean log(`median`) and deviation `sigma`."""

    median: float
    sigma: float

    def draw(self, rng: random.Random) -> float:
        """One value."""
        return self.median * rng.lognormvariate(0.0, self.sigma)


@dataclass(frozen=True)
class Pareto:
    """At least `scale`; the smaller `alpha`, the heavier the tail (mean scale * alpha / (alpha - 1) above 1)."""

    scale: float
    alpha: float

    def draw(self, rng: random.Random) -> float:
        """One value."""
        return self.scale * rng.paretovariate(self.alpha)


Amount = float | Distribution | Sequence[float] | Callable[[Command], float]
"""A number, a distribution, a list (batch or version i takes item i, from the start again after the last), or a
function of the command."""


class Effect(str, Enum):
    """What a fault does to the command it meets."""

    RAISE = "raise"
    """It fails after its duration."""
    HANG = "hang"
    """It never completes, unless aborted."""
    DIE = "die"
    """The engine's process dies after the duration."""
    WRONG_VERSION = "wrong_version"
    """It reports another version than it should."""
    NAN = "nan"
    """The loss is not finite."""
    DEGENERATE = "degenerate"
    """REWARD: no group has a gradient."""
    NO_STEP = "no_step"
    """TRAIN: no optimiser step is taken."""


_ONLY_ON = {
    Effect.WRONG_VERSION: (CommandKind.GENERATE, CommandKind.LOAD_WEIGHTS, CommandKind.TRAIN),
    Effect.NAN: (CommandKind.TRAIN,),
    Effect.NO_STEP: (CommandKind.TRAIN,),
    Effect.DEGENERATE: (CommandKind.REWARD,),
}


@dataclass(frozen=True)
class Fault:
    """Meets commands of `kind` that match every field given; `nth` counts the commands of the kind, from 1."""

    kind: CommandKind
    effect: Effect
    nth: int | None = None
    batch_id: int | None = None
    version: int | None = None
    engine: int | None = None
    message: str = "injected fault"

    def __post_init__(self) -> None:
        """Check that the effect makes sense for the kind."""
        kinds = _ONLY_ON.get(self.effect)
        if kinds is not None and self.kind not in kinds:
            names = " or ".join(kind.value for kind in kinds)
            raise ValueError(f"a fault {self.effect.value} cannot meet {self.kind.value}: use it on {names}")

    def meets(self, command: Command, count: int) -> bool:
        """Whether it befalls this command, the `count`th of its kind."""
        wanted = (self.nth, self.batch_id, self.version, self.engine)
        found = (count, command.batch_id, command.version, command.engine)
        return command.kind is self.kind and all(w is None or w == f for w, f in zip(wanted, found, strict=True))


@dataclass(frozen=True)
class FakeOutcome:
    """What a command comes to."""

    duration_s: float
    completion: Input | None
    """None: it hangs."""
    death: Input | None = None
    """ENGINE_DIED, which precedes the completion."""
    effect: Effect | None = None
    """The fault's, if one met the command."""


@dataclass
class FakeBehaviour:
    """The programme of a fake world. What is not programmed takes no time and succeeds."""

    durations: Mapping[CommandKind, Amount] = field(default_factory=dict)
    tokens: Amount = 64
    """Tokens of a generated batch."""
    faults: Sequence[Fault] = ()
    batches: int | None = None
    """Prompt batches in the source; None: endless."""
    seed: int = 0
    home_pid: int = field(default_factory=os.getpid)
    """The process that wrote the programme: only an engine in another one may really die."""

    def __post_init__(self) -> None:
        """Start counting commands."""
        self._counts = {kind: itertools.count(1) for kind in CommandKind}
        self._faults_of = {kind: [fault for fault in self.faults if fault.kind is kind] for kind in CommandKind}

    def fresh(self) -> FakeBehaviour:
        """The same programme with all counts at their start."""
        return replace(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process with all counts at their start."""
        values = (self.durations, self.tokens, self.faults, self.batches, self.seed, self.home_pid)
        return (FakeBehaviour, values)

    def outcome(self, command: Command) -> FakeOutcome:
        """How long the command takes and what it comes to."""
        fault = self._fault(command)
        duration = self.duration_s(command)
        if fault is None:
            return FakeOutcome(duration, self._success(command))
        completion = None if fault.effect is Effect.HANG else self._faulty(command, fault)
        death = None
        if fault.effect is Effect.DIE and command.engine is not None:
            death = Input(InputKind.ENGINE_DIED, engine=command.engine, message=fault.message)
        return FakeOutcome(duration, completion, death, fault.effect)

    def healthy(self, command: Command) -> FakeOutcome:
        """The same without any fault, and without counting the command."""
        return FakeOutcome(self.duration_s(command), self._success(command))

    def _fault(self, command: Command) -> Fault | None:
        """The first fault that befalls this command, which is counted."""
        count = next(self._counts[command.kind])
        faults = self._faults_of[command.kind]
        return next((fault for fault in faults if fault.meets(command, count)), None) if faults else None

    def duration_s(self, command: Command) -> float:
        """Seconds the command takes."""
        amount = self._amount(self.durations.get(command.kind, 0.0), command, "duration")
        if not amount >= 0:
            raise ValueError(f"the duration of {command.kind.value} came out as {amount}, expected at least 0")
        return amount

    def _faulty(self, command: Command, fault: Fault) -> Input:
        reasons = {Effect.RAISE: "RuntimeError", Effect.DIE: "EngineDied", Effect.NAN: "FloatingPointError"}
        if fault.effect in reasons:
            return Input(InputKind.FAILED, op=command.op, reason=reasons[fault.effect], message=fault.message)
        done = self._success(command)
        if fault.effect is Effect.WRONG_VERSION:
            return _misreport(done)
        if fault.effect is Effect.NO_STEP:
            return replace(done, train_version=command.version, reason="no_step")
        return replace(done, reason="degenerate")

    def _success(self, command: Command) -> Input:
        done = _completion(command)
        if command.kind is CommandKind.GENERATE:
            return done.stamped(tokens=int(self._amount(self.tokens, command, "tokens")))
        if command.kind is CommandKind.LOAD_PROMPTS and self.batches is not None and key_of(command) >= self.batches:
            return replace(done, kind=InputKind.EXHAUSTED)
        return done

    def _amount(self, amount: Amount, command: Command, purpose: str) -> float:
        if isinstance(amount, (int, float)):
            return float(amount)
        if isinstance(amount, Sequence):
            return float(amount[key_of(command) % len(amount)])
        if callable(amount):
            return float(amount(command))
        # Seeding by text is the same in every process, unlike hash().
        place = f"{self.seed}/{purpose}/{command.kind.value}/{key_of(command)}/{command.engine}"
        return amount.draw(random.Random(place))


def key_of(command: Command) -> int:
    """What a command is about: its batch, or else its version, or else its engine."""
    if command.batch_id is not None:
        return command.batch_id
    return command.version if command.version is not None else command.engine or 0


def _completion(command: Command) -> Input:
    """What a command that succeeds reports, its versions as they should be."""
    op, version = command.op, command.version
    if command.kind is CommandKind.GENERATE:
        return Input(InputKind.GENERATED, op=op, rollout_version_first=version, rollout_version_last=version)
    if command.kind is CommandKind.LOAD_WEIGHTS:
        return Input(InputKind.WEIGHTS_LOADED, op=op, rollout_version_last=version)
    if command.kind is CommandKind.TRAIN:
        assert version is not None, command
        return Input(InputKind.TRAINED, op=op, train_version=version + 1)
    return Input(_PLAIN[command.kind], op=op, train_version=version)


_PLAIN = {
    CommandKind.START_TRAINER: InputKind.STARTED,
    CommandKind.START_ENGINE: InputKind.STARTED,
    CommandKind.LOAD_PROMPTS: InputKind.LOADED,
    CommandKind.REWARD: InputKind.REWARDED,
    CommandKind.EXPORT: InputKind.EXPORTED,
    CommandKind.SAVE: InputKind.SAVED,
}


def _misreport(done: Input) -> Input:
    """The same completion with every version it carries off by one."""
    names = ("rollout_version_first", "rollout_version_last", "train_version")
    return replace(done, **{name: getattr(done, name) + 1 for name in names if getattr(done, name) is not None})
