"""Turns decisions into log records and commands, and gives each its sequence number.

The only place that fires transitions and issues operations, so nothing can change without a record.
"""

from __future__ import annotations

from typing import Any

from fsm_trainer.core.config import SECOND_NS, Deadlines
from fsm_trainer.core.events import NOTICES, Command, CommandKind, Input, Record, RecordKind, input_record
from fsm_trainer.core.machines import StateMachine
from fsm_trainer.core.state import Batch, Op, State

_DEADLINE_OF: dict[CommandKind, str] = {
    CommandKind.START_TRAINER: "start_s",
    CommandKind.START_ENGINE: "start_s",
    CommandKind.LOAD_PROMPTS: "load_prompts_s",
    CommandKind.GENERATE: "generate_s",
    CommandKind.REWARD: "reward_s",
    CommandKind.TRAIN: "train_s",
    CommandKind.EXPORT: "sync_s",
    CommandKind.LOAD_WEIGHTS: "sync_s",
    CommandKind.SAVE: "save_s",
}


def limit_s(deadlines: Deadlines, kind: CommandKind) -> float:
    """Seconds an operation of this kind may take; 0 means no limit."""
    return float(getattr(deadlines, _DEADLINE_OF[kind]))


class Recorder:
    """The records and commands of the step being decided, over the state they describe."""

    def __init__(self, state: State) -> None:
        """Start numbering at 0."""
        self.state = state
        self.seq = 0
        self.t_ns = 0
        self.cause = 0
        self.records: list[Record] = []
        self.commands: list[Command] = []

    def begin(self, event: Input) -> None:
        """Open a step: its first record is the input itself."""
        self.records, self.commands = [], []
        self.t_ns = event.t_ns
        self.cause = self.seq
        self.records.append(input_record(event, self._next()))

    def _next(self) -> int:
        self.seq += 1
        return self.seq - 1

    def note(self, kind: RecordKind, machine: StateMachine | str | None = None, **columns: Any) -> None:
        """Append a record of the current step."""
        if isinstance(machine, StateMachine):
            columns["machine"], columns["entity"] = machine.table, machine.entity
        elif machine is not None:
            columns["machine"] = machine
        self.records.append(Record(self.seq, self.t_ns, kind, cause_seq=self.cause, **columns))
        self.seq += 1

    def annotate(self, record: Record) -> Record:
        """Number a row that carries no decision (a metric)."""
        return record._replace(seq=self._next())

    def fire(self, machine: StateMachine, trigger: str, **columns: Any) -> None:
        """Take an edge and record it."""
        source, dest = machine.fire(trigger, self.t_ns)
        self.note(RecordKind.TRANSITION, machine, trigger=trigger, source=source._value_, dest=dest._value_, **columns)

    def fire_batch(self, batch: Batch, trigger: str, *, reason: str | None = None, **columns: Any) -> None:
        """Take an edge of a batch; a terminal state closes and counts it."""
        if batch.version is not None:
            columns["rollout_version_first"] = batch.version
        self.fire(batch.machine, trigger, batch_id=batch.id, engine=batch.engine, reason=reason, **columns)
        if batch.machine.ended:
            del self.state.batches[batch.id]
            self.state.counts[batch.machine.state.value] += 1

    def issue(self, kind: CommandKind, owner: StateMachine | None, **fields: Any) -> Op:
        """Start an operation: recorded, put in flight with its deadline, and handed out as a command."""
        op = Op(seq=self.seq, kind=kind, owner=owner, started_ns=self.t_ns, **fields)
        limit = limit_s(self.state.config.deadlines, kind)
        op.deadline_ns = self.t_ns + int(limit * SECOND_NS) if limit else None
        self.state.ops[op.seq] = op
        self._command(Command(op.seq, kind, op.worker, op.engine, op.batch_id, op.version), owner)
        return op

    def notify(self, kind: CommandKind, *, version: int | None = None, target: int | None = None) -> None:
        """Issue a command that nothing completes."""
        assert kind in NOTICES, kind
        self._command(Command(self.seq, kind, version=version, target=target), None)

    def _command(self, command: Command, owner: StateMachine | None) -> None:
        self.note(
            RecordKind.COMMAND,
            owner,
            trigger=command.kind._value_,
            batch_id=command.batch_id,
            engine=command.engine,
            train_version=command.version,
            reason=None if command.target is None else f"op {command.target}",
        )
        assert self.records[-1].seq == command.op
        self.commands.append(command)
