"""What must hold after every event (DESIGN section 8): a cheap part checked live, and a monitor over the records.

`check_live` reads the state only. `Monitor` follows the records of a run, from the scheduler or from a log, and keeps
its own account to hold against them; tests and simulations use both.
"""

from __future__ import annotations

from fsm_trainer.core.events import CommandKind
from fsm_trainer.core.machines import RolloutState, RunState, TrainerState
from fsm_trainer.core.state import State


class InvariantViolation(AssertionError):
    """The scheduler itself is wrong; the message says which rule broke."""


def hold(condition: bool, rule: str, detail: object) -> None:
    """Raise InvariantViolation unless the condition holds."""
    if not condition:
        raise InvariantViolation(f"{rule}: {detail}")


_ROLLOUT_OPS = {RolloutState.GENERATING: CommandKind.GENERATE, RolloutState.REWARDING: CommandKind.REWARD}
_TRAINER_OPS = {
    TrainerState.TRAINING: CommandKind.TRAIN,
    TrainerState.SYNCING: CommandKind.EXPORT,
    TrainerState.SAVING: CommandKind.SAVE,
}


def check_live(state: State) -> None:
    """The invariants that cost microseconds; raises InvariantViolation."""
    hold(len(state.queue) <= state.config.queue_size, "queue within capacity", state.queue.items())
    counts = state.counts
    ended = counts["trained"] + counts["dropped"] + counts["failed"] + counts["cancelled"]
    hold(counts["admitted"] == ended + len(state.batches), "conservation of batches", counts)
    hold(counts["trained"] == state.train_version, "train_version counts optimiser steps", counts)
    for engine in state.engines:
        hold(engine.version <= state.train_version, "rollout_version <= train_version", engine)
    _check_operations(state)
    if state.run.ended:
        _check_end(state)
    else:
        in_flight = bool(state.ops) or state.stop_deadline_ns is not None
        hold(in_flight or _not_begun(state), "not finished means something is in flight", state.run.state)


def _not_begun(state: State) -> bool:
    return state.run.state is RunState.STARTING and not state.trainer_up


def _check_operations(state: State) -> None:
    """At most one operation in flight per machine, and the machine's state says which."""
    owners = [op.owner for op in state.ops.values() if op.owner is not None]
    hold(len({id(o) for o in owners}) == len(owners), "one operation per machine", [o.entity for o in owners])
    for op in state.ops.values():
        expected = None if op.owner is None else _expected_op(op.owner.state)
        hold(expected in (None, op.kind), "the machine's state says which operation", op)


def _expected_op(state: object) -> CommandKind | None:
    if isinstance(state, RolloutState):
        return _ROLLOUT_OPS.get(state)
    return _TRAINER_OPS.get(state) if isinstance(state, TrainerState) else None


def _check_end(state: State) -> None:
    machines = [state.trainer, *(w.machine for w in state.workers), *(e.machine for e in state.engines)]
    hold(all(m.ended for m in machines), "all machines terminal at the end", [m.state for m in machines])
    hold(not state.ops and not len(state.queue) and not state.batches, "nothing left at the end", state.ops)
