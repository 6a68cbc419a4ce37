"""What goes into the scheduler (inputs) and what comes out of it (records and commands).

All three are flat, so that an input or a record is one row of the event log and can be rebuilt from it. This module
knows nothing of Arrow, threads or clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class InputKind(str, Enum):
    """Everything that can happen to a run, seen from the scheduler."""

    BEGIN = "begin"
    STARTED = "started"
    LOADED = "loaded"
    EXHAUSTED = "exhausted"
    GENERATED = "generated"
    REWARDED = "rewarded"
    TRAINED = "trained"
    EXPORTED = "exported"
    WEIGHTS_LOADED = "weights_loaded"
    SAVED = "saved"
    FAILED = "failed"
    ENGINE_DIED = "engine_died"
    TICK = "tick"
    STOP = "stop"


NON_FINITE = "FloatingPointError"
MISMATCH = "LogprobMismatch"
REFUSED_STEP = frozenset({NON_FINITE, MISMATCH})
"""Reasons of a FAILED train step that the train engine refused before it changed a weight (`engines.base`)."""

ENGINE_GONE = frozenset({"EngineDied", "EngineLost"})
"""Reasons of a FAILED generation whose engine cannot serve any more (`runtime.failures`, `engines.base`)."""


class CommandKind(str, Enum):
    """Everything the scheduler can ask of the outside world."""

    START_TRAINER = "start_trainer"
    START_ENGINE = "start_engine"
    LOAD_PROMPTS = "load_prompts"
    GENERATE = "generate"
    REWARD = "reward"
    TRAIN = "train"
    EXPORT = "export"
    LOAD_WEIGHTS = "load_weights"
    SAVE = "save"
    # The last three are notices: nothing completes them.
    RELEASE_SNAPSHOT = "release_snapshot"
    ABORT = "abort"
    CLOSE_SOURCE = "close_source"


NOTICES = frozenset({CommandKind.RELEASE_SNAPSHOT, CommandKind.ABORT, CommandKind.CLOSE_SOURCE})

COMPLETIONS: dict[CommandKind, frozenset[InputKind]] = {
    CommandKind.START_TRAINER: frozenset({InputKind.STARTED}),
    CommandKind.START_ENGINE: frozenset({InputKind.STARTED}),
    CommandKind.LOAD_PROMPTS: frozenset({InputKind.LOADED, InputKind.EXHAUSTED}),
    CommandKind.GENERATE: frozenset({InputKind.GENERATED}),
    CommandKind.REWARD: frozenset({InputKind.REWARDED}),
    CommandKind.TRAIN: frozenset({InputKind.TRAINED}),
    CommandKind.EXPORT: frozenset({InputKind.EXPORTED}),
    CommandKind.LOAD_WEIGHTS: frozenset({InputKind.WEIGHTS_LOADED}),
    CommandKind.SAVE: frozenset({InputKind.SAVED}),
}
"""Which inputs complete which command; `FAILED` completes any of them."""


class RecordKind(str, Enum):
    """The `kind` column of the event log."""

    INPUT = "input"
    TRANSITION = "transition"
    COMMAND = "command"
    VERSION = "version"
    QUEUE = "queue"
    DROP = "drop"
    SYNC = "sync"
    CHECKPOINT = "checkpoint"
    WAIT = "wait"
    IGNORED = "ignored"
    METRIC = "metric"
    RUN_END = "run_end"


@dataclass(frozen=True)
class Input:
    """One thing that happened, as the loop hands it to `Scheduler.step`.

    `op` is the `seq` of the command this input completes. Times are nanoseconds of the run's monotonic clock;
    `t_ns` is stamped by the loop when it takes the input from its inbox.
    """

    kind: InputKind
    t_ns: int = 0
    op: int | None = None
    """ENGINE_DIED: the start of the engine that died, so that one started since is not taken for it; None: unknown."""
    engine: int | None = None
    """ENGINE_DIED: which engine."""
    rollout_version_first: int | None = None
    """GENERATED: version that the engine reports for its first token."""
    rollout_version_last: int | None = None
    """GENERATED: version at the last token. WEIGHTS_LOADED: the version the engine reports after the load."""
    train_version: int | None = None
    """TRAINED: optimiser steps that the train engine counts. EXPORTED, SAVED: the version exported or saved."""
    tokens: int | None = None
    posted_ns: int | None = None
    started_ns: int | None = None
    finished_ns: int | None = None
    digest: str | None = None
    reason: str | None = None
    """REWARDED: "degenerate" when no group has a gradient. TRAINED: "no_step" when no optimiser step was taken.
    STOP: who asked ("sigint", "sigterm", "user"). FAILED: the exception's type."""
    message: str | None = None

    def stamped(self, **times: int | None) -> Input:
        """The same input with other times; what `dataclasses.replace` gives, in a tenth of the time."""
        copy = object.__new__(Input)
        copy.__dict__.update(self.__dict__, **times)
        return copy


class Record(NamedTuple):
    """One row of the event log; see docs/event-log.md for what each kind fills in."""

    seq: int
    t_ns: int
    kind: RecordKind
    machine: str | None = None
    entity: str | None = None
    trigger: str | None = None
    source: str | None = None
    dest: str | None = None
    cause_seq: int | None = None
    batch_id: int | None = None
    engine: int | None = None
    rollout_version_first: int | None = None
    rollout_version_last: int | None = None
    train_version: int | None = None
    staleness: int | None = None
    queue_len: int | None = None
    tokens: int | None = None
    posted_ns: int | None = None
    started_ns: int | None = None
    finished_ns: int | None = None
    value: float | None = None
    digest: str | None = None
    reason: str | None = None
    message: str | None = None
    numerator: float | None = None
    denominator: float | None = None


@dataclass(frozen=True)
class Command:
    """One operation for a worker thread; its completion carries `op` back. `op` is the seq of its record."""

    op: int
    kind: CommandKind
    worker: int | None = None
    engine: int | None = None
    batch_id: int | None = None
    version: int | None = None
    """TRAIN: train_version before the step. EXPORT, SAVE, RELEASE_SNAPSHOT: the version. LOAD_WEIGHTS: the
    version announced. GENERATE: the version the engine serves."""
    target: int | None = None
    """ABORT: the op to abort."""


def input_record(event: Input, seq: int) -> Record:
    """The log row of an input."""
    return Record(
        seq=seq,
        t_ns=event.t_ns,
        kind=RecordKind.INPUT,
        trigger=event.kind._value_,
        cause_seq=event.op,
        engine=event.engine,
        rollout_version_first=event.rollout_version_first,
        rollout_version_last=event.rollout_version_last,
        train_version=event.train_version,
        tokens=event.tokens,
        posted_ns=event.posted_ns,
        started_ns=event.started_ns,
        finished_ns=event.finished_ns,
        digest=event.digest,
        reason=event.reason,
        message=event.message,
    )


def record_input(record: Record) -> Input:
    """The input that a logged row stands for: the inverse of `input_record`."""
    assert record.kind is RecordKind.INPUT and record.trigger is not None, record
    return Input(
        kind=InputKind(record.trigger),
        t_ns=record.t_ns,
        op=record.cause_seq,
        engine=record.engine,
        rollout_version_first=record.rollout_version_first,
        rollout_version_last=record.rollout_version_last,
        train_version=record.train_version,
        tokens=record.tokens,
        posted_ns=record.posted_ns,
        started_ns=record.started_ns,
        finished_ns=record.finished_ns,
        digest=record.digest,
        reason=record.reason,
        message=record.message,
    )
