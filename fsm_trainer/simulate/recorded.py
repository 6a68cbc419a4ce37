"""Durations of a recorded run: what each of its operations took, and its hand-over either way.

Simulating the recorded configuration with them gives the recorded run again, moment for moment; another configuration
gives what that run would have been with it. Operations that the run never had take what others of their kind took.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fsm_trainer.core.events import Command, CommandKind, InputKind, Record, RecordKind
from fsm_trainer.engines.fake_behaviour import Effect, Fault
from fsm_trainer.runtime.lanes import lane_of
from fsm_trainer.simulate.durations import Amount, Durations

_NS = 1_000_000_000


class _Operation(NamedTuple):
    """One completed operation of the log."""

    command: Command
    key: int
    duration_s: float
    before_s: float
    after_s: float
    tokens: int
    reason: str | None


@dataclass(frozen=True)
class Measured:
    """Seconds by what an operation is about; where nothing was measured, the others of its kind in turn."""

    by_key: dict[tuple[int, int | None], float]

    def __call__(self, command: Command) -> float:
        """The amount for one command."""
        key = _key(command)
        found = self.by_key.get((key, command.engine))
        if found is None:
            values = [value for (other, _), value in self.by_key.items() if other == key] or [*self.by_key.values()]
            found = values[key % len(values)]
        return found


@dataclass(frozen=True)
class Recorded:
    """What a simulation needs of a recorded run, besides a configuration."""

    durations: Durations
    faults: tuple[Fault, ...]
    """Batches that gave no step are to give none again."""
    batches: int | None
    """Size of the prompt source, if the run came to its end."""
    steps: int
    """Optimiser steps the run took."""


def recorded(run: str | Path | Iterable[Record]) -> Recorded:
    """Durations from a run directory, a log file or records. ValueError if there is no log, or nothing in it."""
    if isinstance(run, (str, Path)):
        # pyarrow takes a while to import, and durations by hand do not need it.
        from fsm_trainer.eventlog.reader import read_log, records

        rows = list(records(read_log(run).table))
    else:
        rows = list(run)
    operations = _operations(rows)
    if not any(op.command.kind is CommandKind.GENERATE for op in operations):
        raise ValueError(
            f"{run if isinstance(run, (str, Path)) else 'the log'} holds no finished rollout to learn from"
        )
    ends = [r for r in rows if r.kind is RecordKind.INPUT and r.trigger == InputKind.EXHAUSTED.value]
    loads = {r.seq: r.batch_id for r in rows if r.kind is RecordKind.COMMAND}
    missing = [batch for r in ends if r.cause_seq is not None and (batch := loads[r.cause_seq]) is not None]
    return Recorded(
        durations=Durations(
            _amounts(operations, "duration_s"),
            before=_amounts(operations, "before_s"),
            after=_amounts(operations, "after_s"),
            tokens=_tokens(operations),
        ),
        faults=tuple(_without_step(operations)),
        batches=min(missing, default=None),
        steps=sum(r.kind is RecordKind.VERSION and r.trigger == "step" for r in rows),
    )


def _operations(rows: list[Record]) -> list[_Operation]:
    """Every operation that succeeded, in the order of completion."""
    issued: dict[int, Record] = {}
    free_ns: dict[str, int] = {}
    found = []
    for row in rows:
        if row.kind is RecordKind.COMMAND:
            issued[row.seq] = row
        elif row.kind is RecordKind.INPUT and row.cause_seq in issued and row.finished_ns is not None:
            operation = _operation(issued.pop(row.cause_seq), row, free_ns)
            if row.trigger != InputKind.FAILED.value:
                found.append(operation)
    return found


def _operation(issued: Record, done: Record, free_ns: dict[str, int]) -> _Operation:
    assert done.started_ns is not None and done.finished_ns is not None
    command = _command(issued)
    lane = lane_of(command)
    ready_ns = max(issued.t_ns, free_ns.get(lane, 0))
    free_ns[lane] = max(free_ns.get(lane, 0), done.finished_ns)
    return _Operation(
        command=command,
        key=_key(command),
        duration_s=(done.finished_ns - done.started_ns) / _NS,
        before_s=max(0, done.started_ns - ready_ns) / _NS,
        after_s=max(0, done.t_ns - done.finished_ns) / _NS,
        tokens=done.tokens or 0,
        reason=done.reason,
    )


def _command(row: Record) -> Command:
    """The command that a record stands for."""
    worker = int(row.entity.removeprefix("rollout-")) if row.entity and row.machine == "rollout" else None
    return Command(row.seq, CommandKind(row.trigger), worker, row.engine, row.batch_id, row.train_version)


def _key(command: Command) -> int:
    about = (command.batch_id, command.version, command.engine)
    return next((key for key in about if key is not None), 0)


def _amounts(operations: list[_Operation], column: str) -> dict[CommandKind, Amount]:
    found: dict[CommandKind, dict[tuple[int, int | None], float]] = {}
    for operation in operations:
        by_key = found.setdefault(operation.command.kind, {})
        by_key[operation.key, operation.command.engine] = getattr(operation, column)
    return {kind: Measured(by_key) for kind, by_key in found.items()}


def _tokens(operations: list[_Operation]) -> Amount:
    generated = [op for op in operations if op.command.kind is CommandKind.GENERATE]
    return Measured({(op.key, op.command.engine): float(op.tokens) for op in generated})


def _without_step(operations: list[_Operation]) -> list[Fault]:
    effects = {"degenerate": Effect.DEGENERATE, "no_step": Effect.NO_STEP}
    return [
        Fault(op.command.kind, effects[op.reason], batch_id=op.command.batch_id)
        for op in operations
        if op.reason in effects
    ]
