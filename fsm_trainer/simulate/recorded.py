"""What a recorded run says about time: what each of its operations took, and its hand-over either way.

Simulating the recorded configuration with that gives the recorded run again, moment for moment; another configuration
gives what that run would have been with it. `measured.py` says what operations take that the run never had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Command, CommandKind, InputKind, Record, RecordKind
from fsm_trainer.engines.fake_behaviour import Amount, Effect, Fault, key_of
from fsm_trainer.runtime.lanes import lane_of
from fsm_trainer.simulate.contention import Stretches
from fsm_trainer.simulate.durations import Durations
from fsm_trainer.simulate.measured import Measured, Thinned, spread
from fsm_trainer.simulate.timing import Timing, measure_timing
from fsm_trainer.simulate.world import engine_lane_of

if TYPE_CHECKING:
    from fsm_trainer.eventlog.reader import EventLog

_NS = 1_000_000_000
_EFFECTS = {"degenerate": Effect.DEGENERATE, "no_step": Effect.NO_STEP}
_OF_BATCHES = frozenset({CommandKind.LOAD_PROMPTS, CommandKind.GENERATE, CommandKind.REWARD, CommandKind.TRAIN})
_OF_VERSIONS = frozenset({CommandKind.EXPORT, CommandKind.LOAD_WEIGHTS, CommandKind.SAVE})
_NEEDED = ("input", "command", "version", "run_end")
"""Kinds of rows that durations and moments are read from, besides the transitions of the run itself."""
SCORING = "score_cpu_s"
"""Metric: processor time that scoring a batch took in the trainer's process."""


class _Operation(NamedTuple):
    """One completed operation of the log."""

    command: Command
    began_ns: int
    finished_ns: int
    duration_s: float
    before_s: float
    after_s: float
    tokens: int
    reason: str | None


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
    timing: Timing
    last_batch: int
    """Highest id of a batch that was generated."""
    name: str
    """What it was read from, for messages."""
    config: SchedulerConfig | None = None
    """The scheduler's configuration, where a log's file tells it."""

    def from_nothing(self, steps: int) -> Recorded:
        """The same as a run of so many steps that begins with version and batch 0.

        Of a longer run it takes the first steps and ten stretches from all the others.
        """
        first_batch, first_version = (self.config.first_batch, self.config.first_version) if self.config else (0, 0)
        if steps == self.steps and not first_batch and not first_version:
            return self
        count = self.last_batch + 1 - first_batch
        batches = [first_batch + i for i in spread(count, round(steps * count / self.steps))]
        versions = [first_version + i for i in spread(self.steps + 1, steps + 1)]
        place = {batch: i for i, batch in enumerate(batches)}
        faults = [replace(f, batch_id=place[f.batch_id]) for f in self.faults if f.batch_id in place]
        return replace(self, durations=_thinned(self.durations, batches, versions), faults=tuple(faults), batches=None)


def recorded(run: str | Path | EventLog | Iterable[Record]) -> Recorded:
    """Durations from a run directory, its log or records. ValueError if there is no log, or nothing in it."""
    if isinstance(run, Iterable) and not isinstance(run, str):
        return _recorded(list(run), "the log")
    # pyarrow takes a while to import, and durations by hand do not need it.
    import pyarrow.compute as pc

    from fsm_trainer.eventlog.reader import EventLog, read_log, records

    log = run if isinstance(run, EventLog) else read_log(run)
    needed = pc.field("kind").isin(_NEEDED) | (pc.field("machine") == "run") | (pc.field("reason") == SCORING)
    # The first row is the run's beginning, and its kind is `input`.
    rows = list(records(log.table.filter(needed)))
    # A host takes one call after the other, but for vLLM's; a simulated run, or one of fake operations, has no hosts.
    serial = "rollout_host" in log.run_config and log.run_config.get("rollout_engine") != "vllm"
    config = SchedulerConfig.from_dict(log.scheduler_config)
    # On a GPU most of a step goes on while the interpreter is busy elsewhere.
    shared = log.run_config.get("train_devices") == "cpu"
    return replace(_recorded(rows, str(log.path), serial_engines=serial, interpreter_shared=shared), config=config)


def _recorded(
    rows: list[Record], source: str, *, serial_engines: bool = False, interpreter_shared: bool = False
) -> Recorded:
    operations = _not_paused(_operations(rows, engine_lane_of if serial_engines else lane_of))
    held_up = _held_up(rows, operations) if interpreter_shared else None
    if held_up is not None:
        operations = _not_held_up(operations, held_up)
    generated = [op for op in operations if op.command.kind is CommandKind.GENERATE]
    if not generated:
        raise ValueError(f"{source} holds no finished rollout to learn from")
    ends = [r for r in rows if r.kind is RecordKind.INPUT and r.trigger == InputKind.EXHAUSTED.value]
    loads = {r.seq: r.batch_id for r in rows if r.kind is RecordKind.COMMAND}
    missing = [batch for r in ends if r.cause_seq is not None and (batch := loads[r.cause_seq]) is not None]
    timing = measure_timing(rows)
    return Recorded(
        durations=Durations(
            _amounts(operations, lambda op: op.duration_s),
            before=_amounts(operations, lambda op: op.before_s),
            after=_amounts(operations, lambda op: op.after_s),
            tokens=_amounts(generated, lambda op: op.tokens)[CommandKind.GENERATE],
            serial_engines=serial_engines,
            held_up=held_up or 0.0,
        ),
        faults=tuple(_without_step(operations)),
        batches=min(missing, default=None),
        steps=len(timing.steps_s),
        timing=timing,
        last_batch=max(key_of(op.command) for op in generated),
        name=source,
    )


def _operations(rows: list[Record], lane: Callable[[Command], str]) -> list[_Operation]:
    """Every operation that succeeded, in the order of completion."""
    issued: dict[int, Record] = {}
    free_ns: dict[str, int] = {}
    found = []
    for row in rows:
        if row.kind is RecordKind.COMMAND:
            issued[row.seq] = row
        elif row.kind is RecordKind.INPUT and row.cause_seq in issued and row.finished_ns is not None:
            operation = _operation(issued.pop(row.cause_seq), row, free_ns, lane)
            if row.trigger != InputKind.FAILED.value:
                found.append(operation)
    return found


def _operation(issued: Record, done: Record, free_ns: dict[str, int], lane: Callable[[Command], str]) -> _Operation:
    assert done.started_ns is not None and done.finished_ns is not None
    command = _command(issued)
    free = free_ns.get(lane(command), 0)
    free_ns[lane(command)] = max(free, done.finished_ns)
    # A call to an engine that another worker's call keeps busy has begun, but does nothing yet.
    began_ns = max(done.started_ns, free)
    return _Operation(
        command=command,
        began_ns=began_ns,
        finished_ns=done.finished_ns,
        duration_s=max(0, done.finished_ns - began_ns) / _NS,
        before_s=max(0, began_ns - max(issued.t_ns, free)) / _NS,
        after_s=max(0, done.t_ns - done.finished_ns) / _NS,
        tokens=done.tokens or 0,
        reason=done.reason,
    )


def _command(row: Record) -> Command:
    """The command that a record stands for."""
    worker = int(row.entity.removeprefix("rollout-")) if row.entity and row.machine == "rollout" else None
    return Command(row.seq, CommandKind(row.trigger), worker, row.engine, row.batch_id, row.train_version)


def _amounts(operations: list[_Operation], column: Callable[[_Operation], float]) -> dict[CommandKind, Amount]:
    found: dict[CommandKind, dict[tuple[int, int | None], float]] = {}
    for operation in operations:
        by_key = found.setdefault(operation.command.kind, {})
        by_key[key_of(operation.command), operation.command.engine] = column(operation)
    return {kind: Measured(by_key) for kind, by_key in found.items()}


def _held_up(rows: list[Record], operations: list[_Operation]) -> Measured | None:
    """Share of each reward's time that kept a processor busy in the trainer's process; None if not measured."""
    cpu_s = {r.batch_id: r.value for r in rows if r.reason == SCORING and r.kind is RecordKind.METRIC}
    shares: dict[tuple[int, int | None], float] = {}
    for op in operations:
        spent = cpu_s.get(op.command.batch_id)
        if op.command.kind is CommandKind.REWARD and spent is not None and op.duration_s > 0:
            shares[key_of(op.command), None] = min(1.0, spent / op.duration_s)
    return Measured(shares) if shares else None


def _not_held_up(operations: list[_Operation], share: Measured) -> list[_Operation]:
    """The operations, train steps less what the rewards beside them cost."""
    rewards = [op for op in operations if op.command.kind is CommandKind.REWARD]
    stretches = Stretches((op.began_ns, op.finished_ns, share(op.command)) for op in rewards)
    found = []
    for op in operations:
        if op.command.kind is CommandKind.TRAIN:
            lost_s = stretches.lost_ns(op.began_ns, op.finished_ns) / _NS
            op = op._replace(duration_s=max(0.0, op.duration_s - lost_s))
        found.append(op)
    return found


def _not_paused(operations: list[_Operation]) -> list[_Operation]:
    """The operations, generations less what their engine's loads of weights took of them (in-flight sync)."""
    loads: dict[int | None, list[tuple[int, int, float]]] = {}
    for op in operations:
        if op.command.kind is CommandKind.LOAD_WEIGHTS:
            loads.setdefault(op.command.engine, []).append((op.began_ns, op.finished_ns, 1.0))
    pauses = {engine: Stretches(stretches) for engine, stretches in loads.items()}
    found = []
    for op in operations:
        if op.command.kind is CommandKind.GENERATE and op.command.engine in pauses:
            lost_s = pauses[op.command.engine].lost_ns(op.began_ns, op.finished_ns) / _NS
            op = op._replace(duration_s=max(0.0, op.duration_s - lost_s))
        found.append(op)
    return found


def _without_step(operations: list[_Operation]) -> list[Fault]:
    return [
        Fault(op.command.kind, _EFFECTS[op.reason], batch_id=op.command.batch_id)
        for op in operations
        if op.reason in _EFFECTS
    ]


def _thinned(durations: Durations, batches: Sequence[int], versions: Sequence[int]) -> Durations:
    def thin(amounts: dict[CommandKind, Amount]) -> dict[CommandKind, Amount]:
        found = {}
        for kind, amount in amounts.items():
            picks = batches if kind in _OF_BATCHES else versions if kind in _OF_VERSIONS else None
            found[kind] = amount if picks is None or not isinstance(amount, Measured) else Thinned(amount, picks)
        return found

    tokens, held_up = durations.tokens, durations.held_up
    return replace(
        durations,
        operations=thin(dict(durations.operations)),
        before=thin(dict(durations.before)),
        after=thin(dict(durations.after)),
        tokens=Thinned(tokens, batches) if isinstance(tokens, Measured) else tokens,
        held_up=Thinned(held_up, batches) if isinstance(held_up, Measured) else held_up,
    )
