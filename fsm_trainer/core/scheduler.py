"""The pure core: `Scheduler.step` turns one input into the records to log and the commands to carry out.

The same class decides in a live run, in replay, in simulation and in tests. It reads no clock, no random generator, no
file and no environment: what it decides follows from its configuration and the inputs it was given, in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsm_trainer.core import handlers, invariants, rules, waits
from fsm_trainer.core.admission import ADMISSION_TYPES
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Command, Input, Record, RecordKind
from fsm_trainer.core.machines import StateMachine
from fsm_trainer.core.recorder import Recorder
from fsm_trainer.core.state import State

MAX_CHANGES = 10_000
"""Rule applications in one step; far above what any state needs, so reaching it is a livelock."""


@dataclass(frozen=True)
class Status:
    """What a display shows: a copy, safe to read from another thread."""

    run: str
    trainer: str
    trainer_cause: str
    workers: tuple[str, ...]
    worker_causes: tuple[str, ...]
    engines: tuple[str, ...]
    rollout_versions: tuple[int, ...]
    train_version: int
    consumed: int
    queue_len: int
    queue_size: int


class Scheduler:
    """Decides a run. One instance per run, used by one thread."""

    def __init__(self, config: SchedulerConfig) -> None:
        """A run that waits for its `BEGIN` input."""
        self.config = config
        self.state = State(config)
        self.admission = ADMISSION_TYPES[config.admission](self.state)
        self._recorder = Recorder(self.state)

    def step(self, event: Input) -> tuple[list[Record], list[Command]]:
        """Take one input; returns what to log (the input first) and then what to do."""
        assert not self.finished, f"{event} after the end of the run"
        rec = self._recorder
        rec.begin(event)
        handlers.take_in(rec, self.admission, event)
        for _ in range(MAX_CHANGES):
            if not self._apply_a_rule():
                break
        else:
            raise AssertionError(f"no fixed point after {MAX_CHANGES} changes: {rec.records[-10:]}")
        if not self.finished:
            self._note_waits()
        invariants.check_live(self.state)
        return rec.records, rec.commands

    def annotate(self, record: Record) -> Record:
        """Give a row that carries no decision (a metric) its place in the log."""
        return self._recorder.annotate(record)

    @property
    def next_deadline_ns(self) -> int | None:
        """When the loop must post a TICK, unless something happens before."""
        return waits.next_deadline_ns(self.state)

    @property
    def finished(self) -> bool:
        """Whether the run has ended and its last record is out."""
        return self.state.run.ended

    @property
    def outcome(self) -> str | None:
        """ "completed", "interrupted" or "failed" once finished."""
        return self.state.outcome if self.finished else None

    @property
    def error(self) -> str | None:
        """The first error, if any."""
        return self.state.error

    def status(self) -> Status:
        """A copy of what a display shows."""
        s = self.state
        return Status(
            run=s.run.state.value,
            trainer=s.trainer.state.value,
            trainer_cause=s.trainer.cause,
            workers=tuple(w.machine.state.value for w in s.workers),
            worker_causes=tuple(w.machine.cause for w in s.workers),
            engines=tuple(e.machine.state.value for e in s.engines),
            rollout_versions=tuple(e.version for e in s.engines),
            train_version=s.train_version,
            consumed=s.consumed,
            queue_len=len(s.queue),
            queue_size=s.config.queue_size,
        )

    def _apply_a_rule(self) -> bool:
        """Let the first rule that has something to change do so."""
        rec, admission = self._recorder, self.admission
        for rule in rules.RULES:  # noqa: SIM110 - quicker than any() over a generator
            if rule(rec, admission):
                return True
        return False

    def _note_waits(self) -> None:
        """Record each wait whose cause is new or has changed."""
        for machine, cause in waits.causes(self.state):
            if machine.cause != cause:
                self._note_wait(machine, cause)

    def _note_wait(self, machine: StateMachine, cause: str) -> None:
        machine.cause = cause
        self._recorder.note(RecordKind.WAIT, machine, source=machine.state._value_, reason=cause)
