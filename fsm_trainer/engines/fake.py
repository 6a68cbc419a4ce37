"""Fake engines and operations in real time, for tests and for trying the runtime without a model.

`FakeOperations` stands for a whole world behind the lanes; `FakeRolloutEngine` and `FakeTrainEngine` stand for one
engine behind a host. What they do is a `FakeBehaviour`; nothing here decides.
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from fsm_trainer.core.batch import TrainSequence
from fsm_trainer.core.events import Command, CommandKind, Input, InputKind
from fsm_trainer.engines.base import Loaded, Rollout, RolloutRequest, Sample, Snapshot, TrainResult
from fsm_trainer.engines.fake_behaviour import (
    Amount,
    Effect,
    FakeBehaviour,
    FakeOutcome,
    Fault,
    Lognormal,
    Pareto,
    Uniform,
)
from fsm_trainer.engines.logprob_gap import GapLimit

__all__ = [
    "Amount",
    "Effect",
    "FakeBehaviour",
    "FakeOperations",
    "FakeOutcome",
    "FakeRolloutEngine",
    "FakeTrainEngine",
    "Fault",
    "Lognormal",
    "OperationAborted",
    "Pareto",
    "Uniform",
]

EXIT_CODE = 13
"""What the process of a fake engine exits with when it dies."""
_VOCABULARY = 32
_EOS = 0
_STOPS = 0.2
"""Share of tokens that end a completion."""


class OperationAborted(RuntimeError):  # noqa: N818
    """The operation was told to give up."""


class FakeOperations:
    """Executes commands as its behaviour says, waiting in real time; an ABORT ends any wait with a failure."""

    def __init__(self, behaviour: FakeBehaviour, *, post: Callable[[Input], None] | None = None) -> None:
        """`post` takes what happens beside a completion (an engine's death)."""
        self.behaviour = behaviour
        self.notices: list[Command] = []
        self._post = post
        self._lock = threading.Lock()
        self._aborts: dict[int, threading.Event] = {}

    def execute(self, command: Command) -> Input:
        """Wait as long as the command takes, and return what it comes to."""
        outcome = self.behaviour.outcome(command)
        _wait(command, outcome, self._abort_of(command.op))
        if outcome.death is not None and self._post is not None:
            self._post(outcome.death)
        assert outcome.completion is not None
        return outcome.completion

    def notice(self, command: Command) -> None:
        """Note it; an ABORT releases the operation it names, also one that has not begun."""
        self.notices.append(command)
        if command.kind is CommandKind.ABORT:
            assert command.target is not None, command
            self._abort_of(command.target).set()

    def _abort_of(self, op: int) -> threading.Event:
        with self._lock:
            return self._aborts.setdefault(op, threading.Event())


class FakeRolloutEngine:
    """A rollout engine without a model; its samples follow from the request's seed and the version served."""

    def __init__(
        self, behaviour: FakeBehaviour, *, engine: int = 0, n_samples: int = 2, max_new_tokens: int = 4
    ) -> None:
        """`engine` is its index, which faults may name."""
        self._behaviour = behaviour
        self._engine = engine
        self._n_samples = n_samples
        self._max_new_tokens = max_new_tokens
        self._version = -1
        self._generating = False
        self._aborted = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Take as long as START_ENGINE is said to take."""
        self._do(Command(0, CommandKind.START_ENGINE, engine=self._engine))

    def load_weights(self, snapshot: Snapshot) -> Loaded:
        """Serve the snapshot's version from now on."""
        done = self._do(Command(0, CommandKind.LOAD_WEIGHTS, engine=self._engine, version=snapshot.version))
        self._version = snapshot.version
        assert done.rollout_version_last is not None
        return Loaded(done.rollout_version_last, snapshot.nbytes)

    def generate(self, request: RolloutRequest) -> Rollout:
        """Make up `n_samples` completions for each prompt."""
        if self._version < 0:
            raise RuntimeError("no weights loaded: load_weights must succeed before generate")
        with self._lock:
            self._generating = True
            self._aborted.clear()
        try:
            where = {"engine": self._engine, "batch_id": request.batch_id, "version": self._version}
            done = self._do(Command(0, CommandKind.GENERATE, **where))
        finally:
            with self._lock:
                self._generating = False
                self._aborted.clear()
        groups = tuple(self._group(request.seed, index) for index in range(len(request.prompts)))
        assert done.rollout_version_first is not None and done.rollout_version_last is not None
        return Rollout(groups, done.rollout_version_first, done.rollout_version_last)

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> None:
        """It has no model to score with."""

    def abort(self) -> None:
        """Make a running `generate` raise; a no-op when idle."""
        with self._lock:
            if self._generating:
                self._aborted.set()

    def close(self) -> None:
        """Nothing to free."""

    def _do(self, command: Command) -> Input:
        return _perform(self._behaviour, command, self._aborted)

    def _group(self, seed: int, prompt: int) -> tuple[Sample, ...]:
        return tuple(self._sample(f"{seed}/{self._version}/{prompt}/{index}") for index in range(self._n_samples))

    def _sample(self, place: str) -> Sample:
        rng = random.Random(place)
        tokens: list[int] = []
        while len(tokens) < self._max_new_tokens and _EOS not in tokens:
            tokens.append(_EOS if rng.random() < _STOPS else rng.randrange(_VOCABULARY))
        stopped = _EOS in tokens
        logprobs = tuple(-rng.random() for _ in tokens)
        return Sample(tuple(tokens), logprobs, "stop" if stopped else "length")


class FakeTrainEngine:
    """A train engine without a model: it counts optimiser steps."""

    def __init__(self, behaviour: FakeBehaviour) -> None:
        """No steps taken."""
        self._behaviour = behaviour
        self._never = threading.Event()
        self.train_version = 0
        self.published: set[int] = set()

    def start(self) -> None:
        """Take as long as START_TRAINER is said to take."""
        self._do(Command(0, CommandKind.START_TRAINER))

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> None:
        """It has no model to score with."""

    def train(self, sequences: Sequence[TrainSequence], max_gap: GapLimit | None = None) -> TrainResult:
        """Count one optimiser step; its samples' logprobs are made up, so no gap means anything."""
        done = self._do(Command(0, CommandKind.TRAIN, version=self.train_version))
        stepped = done.reason != "no_step"
        self.train_version += stepped
        assert done.train_version is not None
        return TrainResult(stepped, done.train_version, {"loss": 1.0 / (1 + self.train_version)})

    def export(self, version: int) -> Snapshot:
        """Publish nothing as `version`."""
        self._do(Command(0, CommandKind.EXPORT, version=version))
        self.published.add(version)
        return Snapshot(version, f"fake:{version}", 0)

    def release(self, version: int) -> None:
        """Forget a published version."""
        self.published.discard(version)

    def save(self, directory: str) -> None:
        """Write the step count to `fake.json`."""
        self._do(Command(0, CommandKind.SAVE, version=self.train_version))
        Path(directory).mkdir(parents=True, exist_ok=True)
        Path(directory, "fake.json").write_text(json.dumps({"train_version": self.train_version}))

    def restore(self, directory: str) -> int:
        """Count on from `fake.json`."""
        self.train_version = json.loads(Path(directory, "fake.json").read_text())["train_version"]
        return self.train_version

    def close(self) -> None:
        """Forget everything published."""
        self.published.clear()

    def _do(self, command: Command) -> Input:
        return _perform(self._behaviour, command, self._never)


def _wait(command: Command, outcome: FakeOutcome, aborted: threading.Event) -> None:
    """Let the command's duration pass; raises OperationAborted when it is aborted before or meanwhile."""
    hangs = outcome.completion is None
    if aborted.wait(None if hangs else outcome.duration_s):
        raise OperationAborted(f"{command.kind.value} was aborted")


def _perform(behaviour: FakeBehaviour, command: Command, aborted: threading.Event) -> Input:
    """What an engine does with a command: wait, then raise, die or report."""
    outcome = behaviour.outcome(command)
    _wait(command, outcome, aborted)
    done = outcome.completion
    assert done is not None
    if outcome.effect is Effect.DIE:
        _die(behaviour)
    if done.kind is InputKind.FAILED:
        raise (FloatingPointError if outcome.effect is Effect.NAN else RuntimeError)(done.message)
    return done


def _die(behaviour: FakeBehaviour) -> NoReturn:
    if os.getpid() == behaviour.home_pid:
        raise RuntimeError("a fake engine can die only in a process of its own: put it into a ProcessHost")
    os._exit(EXIT_CODE)
