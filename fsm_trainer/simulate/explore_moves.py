"""What can happen next in a small run: completions, one fault, stop requests; and how each reaches the scheduler.

A move names an operation by what it is about, so a schedule of moves can be replayed on any scheduler and printed as
a test. The clock stands still at 0: an operation that is to be late is given a deadline of 0 and a tick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fsm_trainer.core.events import MISMATCH, NON_FINITE, Command, CommandKind, Input, InputKind, Record
from fsm_trainer.core.machines import RolloutState, TrainerState
from fsm_trainer.core.scheduler import Scheduler
from fsm_trainer.core.state import Op, State


@dataclass(frozen=True)
class World:
    """What the outside does: where prompts end and which batches give no optimiser step."""

    prompts: int | None = None
    degenerate: frozenset[int] = frozenset()
    no_step: frozenset[int] = frozenset()

    def gives_step(self, batch_id: int) -> bool:
        """Whether training on the batch moves the optimiser."""
        return batch_id not in self.degenerate and batch_id not in self.no_step


class Move(NamedTuple):
    """One thing that happens; `kind`, `batch_id` and `engine` name the operation it happens to.

    With in-flight sync the end of a generation says which versions it was made with: `first` and `last`.
    """

    action: str
    kind: CommandKind | None = None
    batch_id: int | None = None
    engine: int | None = None
    first: int | None = None
    last: int | None = None


FAULTY_VERSIONS = (CommandKind.GENERATE, CommandKind.LOAD_WEIGHTS, CommandKind.TRAIN)
"""Operations whose completion reports a version that can be wrong."""

_REASONS_OF = {CommandKind.GENERATE: "EngineLost", CommandKind.LOAD_WEIGHTS: MISMATCH}
"""Failures of which it matters that they are no others: with the engine gone, and with weights that are wrong."""
_STEP = tuple[list[Record], list[Command]]
_COMPLETION = {
    CommandKind.START_TRAINER: InputKind.STARTED,
    CommandKind.START_ENGINE: InputKind.STARTED,
    CommandKind.EXPORT: InputKind.EXPORTED,
    CommandKind.SAVE: InputKind.SAVED,
}


def moves(state: State, *, faults: int, stops: int) -> list[Move]:
    """Everything that can happen next, completions first; at most so many faults, and stops in all."""
    found: list[Move] = []
    for op in state.ops.values():
        name = (op.kind, op.batch_id, op.engine)
        found.extend(Move("complete", *name, *stamp) for stamp in _stamps(state, op))
        if op.aborted:
            found.append(Move("aborted", *name))
    if state.stops < stops:
        found.append(Move("stop"))
    if state.stop_deadline_ns is not None:
        found.append(Move("give_up"))
    if faults:
        found.extend(_faults(state))
    return found


def _stamps(state: State, op: Op) -> list[tuple[int, int] | tuple[()]]:
    """Every pair of versions that a generation may be stamped with when it ends now; one without a name if all alike.

    An engine may begin it, end it, and be through with a load in any order, whatever order it is told of them in.
    """
    if op.kind is not CommandKind.GENERATE or not state.config.inflight:
        return [()]
    assert op.version is not None and op.engine is not None
    versions = range(op.version, state.newest_on(state.engines[op.engine]) + 1)
    return [(first, last) for first in versions for last in versions if first <= last]


def _faults(state: State) -> list[Move]:
    found = [Move("loop_fails")]
    for op in state.ops.values():
        name = (op.kind, op.batch_id, op.engine)
        found.extend((Move("fail", *name), Move("late", *name)))
        if op.kind in FAULTY_VERSIONS:
            found.append(Move("wrong_version", *name))
        if op.kind is CommandKind.TRAIN:
            found.append(Move("not_finite", *name))
        if state.config.on_engine_failure == "restart" and op.kind in _REASONS_OF:
            found.append(Move(_REASONS_OF[op.kind], *name))
    found.extend(Move("engine_dies", engine=e.index) for e in state.engines if not e.machine.ended)
    if state.active:
        waiting = [w.batch for w in state.workers if w.machine.state is RolloutState.QUEUED]
        found.extend(Move("queue_full_too_long", batch_id=batch) for batch in waiting)
        if state.trainer.state is TrainerState.WAITING:
            found.append(Move("queue_empty_too_long"))
    return found


def is_fault(move: Move) -> bool:
    """Whether the move is something going wrong; an operation that outlasts the shutdown is, and needs no budget."""
    return move.action not in ("complete", "aborted", "stop")


def heals(state: State, move: Move) -> bool:
    """Whether a fault is the failure of an engine that has served, so that starting it anew heals it."""
    if move.engine is None or state.engines[move.engine].version < 0:
        return False
    if move.kind is CommandKind.GENERATE:
        return move.action in ("EngineLost", "late")
    return move.action in ("engine_dies", "fail", "late", "wrong_version")


def apply(scheduler: Scheduler, move: Move, world: World) -> _STEP:
    """Let it happen."""
    op = _find(scheduler.state, move) if move.kind is not None else None
    if move.action == "complete":
        assert op is not None
        return scheduler.step(completion(op, world, move))
    return scheduler.step(_disturbance(scheduler, move, op))


def _find(state: State, move: Move) -> Op:
    found = [o for o in state.ops.values() if (o.kind, o.batch_id, o.engine) == move[1:4]]
    assert len(found) == 1, (move, state.ops)
    return found[0]


def completion(op: Op, world: World, move: Move) -> Input:
    """What a well-behaved outside answers."""
    seq, version = op.seq, op.version
    if op.kind is CommandKind.LOAD_PROMPTS:
        assert op.batch_id is not None
        there = world.prompts is None or op.batch_id < world.prompts
        return Input(InputKind.LOADED if there else InputKind.EXHAUSTED, op=seq)
    if op.kind is CommandKind.GENERATE:
        first, last = (version, version) if move.first is None else (move.first, move.last)
        return Input(InputKind.GENERATED, op=seq, rollout_version_first=first, rollout_version_last=last, tokens=10)
    if op.kind is CommandKind.REWARD:
        return Input(InputKind.REWARDED, op=seq, reason="degenerate" if op.batch_id in world.degenerate else None)
    if op.kind is CommandKind.TRAIN:
        assert version is not None
        if op.batch_id in world.no_step:
            return Input(InputKind.TRAINED, op=seq, train_version=version, reason="no_step")
        return Input(InputKind.TRAINED, op=seq, train_version=version + 1)
    if op.kind is CommandKind.LOAD_WEIGHTS:
        return Input(InputKind.WEIGHTS_LOADED, op=seq, rollout_version_last=version)
    return Input(_COMPLETION[op.kind], op=seq, train_version=version)


def _disturbance(scheduler: Scheduler, move: Move, op: Op | None) -> Input:
    s, seq = scheduler.state, None if op is None else op.seq
    if move.action == "stop":
        return Input(InputKind.STOP, reason="user")
    if move.action in ("fail", "aborted"):
        return Input(InputKind.FAILED, op=seq, reason="ValueError", message=move.action)
    if move.action in _REASONS_OF.values():
        return Input(InputKind.FAILED, op=seq, reason=move.action, message="told why")
    if move.action == "not_finite":
        return Input(InputKind.FAILED, op=seq, reason=NON_FINITE, message="loss is nan")
    if move.action == "loop_fails":
        return Input(InputKind.FAILED, reason="OSError", message="disk full")
    if move.action == "engine_dies":
        return Input(InputKind.ENGINE_DIED, engine=move.engine, message="killed")
    if move.action == "wrong_version":
        assert op is not None
        return _wrong_version(s, op)
    _make_late(s, move, op)
    return Input(InputKind.TICK)


def _wrong_version(s: State, op: Op) -> Input:
    assert op.version is not None
    wrong = op.version + 2
    if op.kind is CommandKind.GENERATE:
        assert op.engine is not None
        wrong = s.newest_on(s.engines[op.engine]) + 1
        first = op.version if s.config.inflight else wrong
        return Input(InputKind.GENERATED, op=op.seq, rollout_version_first=first, rollout_version_last=wrong)
    if op.kind is CommandKind.TRAIN:
        return Input(InputKind.TRAINED, op=op.seq, train_version=wrong)
    return Input(InputKind.WEIGHTS_LOADED, op=op.seq, rollout_version_last=wrong)


def _make_late(s: State, move: Move, op: Op | None) -> None:
    """Move one deadline to now, which is 0."""
    if move.action == "late":
        assert op is not None
        op.deadline_ns = 0
    elif move.action == "give_up":
        s.stop_deadline_ns = 0
    else:
        since = -int(s.config.deadlines.queue_s * 1e9)
        machine = s.trainer
        if move.action == "queue_full_too_long":
            machine = next(w.machine for w in s.workers if w.batch == move.batch_id)
        else:
            s.running_since_ns = since
        machine.since_ns = since
