"""What must hold after every event: a cheap part checked live, and a monitor over the records.

`check_live` and `check_state` read the state only: the first costs microseconds and runs live, the second says that
nobody waits while what it waits for is there. `Monitor` (monitor.py) follows the records of a run, from the scheduler
or from a log, and keeps its own account to hold against them; tests and simulations use all three.
"""

from __future__ import annotations

from fsm_trainer.core.events import CommandKind
from fsm_trainer.core.machines import EngineState, RolloutState, RunState, TrainerState
from fsm_trainer.core.policy import lockstep_publication
from fsm_trainer.core.state import Batch, Engine, State


class InvariantViolation(AssertionError):
    """The scheduler itself is wrong; the message says which rule broke."""


def hold(condition: bool, rule: str, detail: object) -> None:
    """Raise InvariantViolation unless the condition holds."""
    if not condition:
        raise InvariantViolation(f"{rule}: {detail}")


_OPERATION_OF: dict[object, CommandKind] = {
    RolloutState.GENERATING: CommandKind.GENERATE,
    RolloutState.REWARDING: CommandKind.REWARD,
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
    steps = state.train_version - state.config.first_version
    hold(counts["trained"] == steps, "train_version counts optimiser steps", counts)
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
    owners = set()
    for op in state.ops.values():
        if op.owner is None:
            continue
        hold(id(op.owner) not in owners, "one operation per machine", op)
        owners.add(id(op.owner))
        hold(_OPERATION_OF.get(op.owner.state, op.kind) is op.kind, "the machine's state says which operation", op)


def _check_end(state: State) -> None:
    machines = [state.trainer, *(w.machine for w in state.workers), *(e.machine for e in state.engines)]
    hold(all(m.ended for m in machines), "all machines terminal at the end", [m.state for m in machines])
    hold(not state.ops and not len(state.queue) and not state.batches, "nothing left at the end", state.ops)


def check_state(state: State) -> None:
    """Nobody waits while what it waits for is there; said in other words than the rules that see to it."""
    if not state.active:
        return
    hold(not (state.parked and len(state.queue) < state.config.queue_size), "no batch parks beside a free slot", state)
    for engine in state.engines:
        _check_engine(state, engine)
    for batch in state.unstarted():
        ready = state.workers[batch.worker].machine.state is RolloutState.READY
        opened = state.engines[batch.engine].machine.state is EngineState.OPEN
        hold(not (ready and opened and _may_start(state, batch)), "no ready batch waits at an open gate", batch)
    if state.trainer.state is TrainerState.WAITING:
        _check_trainer_waits(state)
    if state.run.state is RunState.RUNNING and not state.exhausted and state.steps_left():
        idle = [w for w in state.workers if w.machine.state is RolloutState.IDLE]
        hold(not any(_may_admit(state, state.engines[w.engine]) for w in idle), "no worker idles needlessly", idle)


def _check_engine(state: State, engine: Engine) -> None:
    """A due sync closes the gate at once, and a drained engine loads at once; in flight, any that serves does."""
    if not state.may_generate_more() or state.config.admission == "lockstep":
        return
    due = state.newest_publication if state.exporting is None else state.exporting
    opened = engine.machine.state is EngineState.OPEN
    started = engine.machine.state is EngineState.STARTING and engine.up
    hold(not (started and state.exporting is None), "an engine that was started anew loads what is published", engine)
    if state.config.sync_mode == "inflight":
        waits = opened and state.exporting is None and engine.publication < state.newest_publication
        hold(not waits, "an in-flight engine loads what is published", engine)
        hold(engine.machine.state is not EngineState.DRAINING, "an in-flight engine never drains", engine)
        return
    hold(not opened or due <= engine.publication, "a due sync closes the gate", engine)
    idle = engine.machine.state is EngineState.DRAINING and not engine.generating
    hold(not (idle and state.exporting is None), "a drained engine loads what is published", engine)


def _lockstep_publication(state: State, batch_id: int) -> int:
    c = state.config
    return lockstep_publication(
        batch_id, c.max_staleness, c.sync_interval, save_points=c.save_points, first=c.first_batch
    )


def _may_start(state: State, batch: Batch) -> bool:
    engine, config = state.engines[batch.engine], state.config
    if config.admission == "lockstep":
        return engine.publication == _lockstep_publication(state, batch.id)
    if config.admission == "greedy":
        return state.train_version + state.in_training - engine.version <= config.max_staleness
    return True


def _may_admit(state: State, engine: Engine) -> bool:
    """The admission rules again; paced by Hall's condition: no deadline has more batches up to it than steps."""
    config, now = state.config, state.train_version + state.in_training
    if config.admission == "lockstep":
        return _lockstep_publication(state, state.next_id) <= state.consumed
    if config.admission == "greedy":
        return now - engine.version <= config.max_staleness
    deadlines = [state.deadline_of(b) for b in state.unconsumed()] + [engine.version + config.max_staleness]
    return all(sum(other <= d for other in deadlines) <= d - now + 1 for d in deadlines)


def _check_trainer_waits(state: State) -> None:
    finished = [*state.queue.items(), *state.parked]
    if not finished:
        return
    admission = state.config.admission
    hold(admission != "greedy" or not len(state.queue), "a greedy trainer takes what is queued", finished)
    hold(
        admission != "lockstep" or state.consumed not in finished, "lockstep takes the batch whose turn it is", finished
    )
    if admission == "paced":
        first = min(state.deadline_of(state.batches[i]) for i in finished)
        unfinished = [b for b in state.unconsumed() if b.id not in finished]
        older = any(state.deadline_of(b) <= first for b in unfinished)
        hold(older, "a paced trainer waits only for an older batch", finished)
