"""What each input changes by itself, before the rules are applied."""

from __future__ import annotations

from collections.abc import Callable

from fsm_trainer.core import consumption, restarting, shutdown
from fsm_trainer.core.admission import Admission
from fsm_trainer.core.events import COMPLETIONS, CommandKind, Input, InputKind, RecordKind
from fsm_trainer.core.machines import RolloutState, RunState, TrainerState
from fsm_trainer.core.recorder import Recorder
from fsm_trainer.core.state import NO_VERSION, Batch, Op

Handler = Callable[[Recorder, Admission, Input, Op], None]


def take_in(rec: Recorder, admission: Admission, event: Input) -> None:
    """Apply one input."""
    if event.kind is InputKind.BEGIN:
        _on_begin(rec)
    elif event.kind is InputKind.STOP:
        shutdown.on_stop(rec, event)
    elif event.kind is InputKind.TICK:
        shutdown.on_tick(rec)
    elif event.kind is InputKind.ENGINE_DIED:
        _on_engine_died(rec, event)
    elif event.kind is InputKind.FAILED and event.op is None:
        shutdown.fail(rec, f"{event.reason}: {event.message}")
    else:
        _on_completion(rec, admission, event)


def _on_begin(rec: Recorder) -> None:
    s = rec.state
    rec.issue(CommandKind.START_TRAINER, s.trainer)
    for engine in s.engines:
        restarting.start(rec, engine)


def _on_engine_died(rec: Recorder, event: Input) -> None:
    s = rec.state
    assert event.engine is not None, event
    engine = s.engines[event.engine]
    if s.run.state is RunState.STOPPING or engine.machine.ended:
        rec.note(RecordKind.IGNORED, engine.machine, engine=engine.index, reason="stopping", message=event.message)
        return
    if event.op is not None and event.op != engine.start_op:
        rec.note(RecordKind.IGNORED, engine.machine, engine=engine.index, reason="replaced", message=event.message)
        return
    message = f"{engine.machine.entity} died in state {engine.machine.state.value}: {event.message}"
    if s.config.on_engine_failure == "restart" and engine.version != NO_VERSION:
        in_vain = restarting.recover(rec, engine, "died", message, died=True)
        if in_vain is None:
            return
        message = in_vain
    for op in [op for op in s.ops.values() if op.owner is engine.machine]:
        del s.ops[op.seq]
        s.abandoned.add(op.seq)
    rec.fire(engine.machine, "break", engine=engine.index, reason="died", message=message)
    shutdown.fail(rec, message)


def _on_completion(rec: Recorder, admission: Admission, event: Input) -> None:
    """Match a completion to the one operation it completes; anything else is recorded and ignored."""
    s = rec.state
    op = s.ops.get(event.op) if event.op is not None else None
    if op is None:
        late = event.op in s.abandoned
        rec.note(RecordKind.IGNORED, trigger=event.kind.value, reason="late" if late else "unknown")
        return
    if event.kind is not InputKind.FAILED and event.kind not in COMPLETIONS[op.kind]:
        rec.note(RecordKind.IGNORED, op.owner, trigger=event.kind.value, reason=f"not a completion of {op.kind.value}")
        return
    del s.ops[op.seq]
    if event.kind is InputKind.FAILED:
        _on_failed(rec, event, op)
    else:
        _HANDLERS[op.kind](rec, admission, event, op)


def _on_failed(rec: Recorder, event: Input, op: Op) -> None:
    s = rec.state
    if op.kind is CommandKind.GENERATE and op.engine is not None and op.batch_id is not None:
        s.engines[op.engine].generating.discard(op.batch_id)
    if op.aborted:
        return
    who = "loader" if op.owner is None else op.owner.entity
    of_batch = "" if op.batch_id is None else f" of batch {op.batch_id}"
    message = f"{who}: {op.kind.value}{of_batch} failed: {event.reason}: {event.message}"
    shutdown.fail_operation(rec, op, event.reason or "failed", message)


def _on_started(rec: Recorder, admission: Admission, event: Input, op: Op) -> None:
    if op.engine is None:
        rec.state.trainer_up = True
    else:
        rec.state.engines[op.engine].up = True


def _on_prompts(rec: Recorder, admission: Admission, event: Input, op: Op) -> None:
    s = rec.state
    assert op.batch_id is not None
    batch = s.batches.get(op.batch_id)
    if s.run.state is RunState.STOPPING:
        return
    if event.kind is InputKind.EXHAUSTED:
        s.source_end = op.batch_id if s.source_end is None else min(s.source_end, op.batch_id)
        s.prompts.pop(op.batch_id, None)
        if batch is not None:
            shutdown.batch_cancelled_by_exhaustion(rec, batch)
    elif batch is not None:
        del s.prompts[op.batch_id]
        rec.fire(s.workers[batch.worker].machine, "loaded", batch_id=batch.id)
    else:
        s.prompts[op.batch_id] = True


def _on_generated(rec: Recorder, admission: Admission, event: Input, op: Op) -> None:
    s = rec.state
    assert op.batch_id is not None and op.engine is not None
    batch = s.batches[op.batch_id]
    s.engines[op.engine].generating.discard(batch.id)
    if s.run.state is RunState.STOPPING:
        return
    problem = _stamp_problem(rec, event, batch)
    if problem:
        shutdown.fail_operation(rec, op, "wrong_version", problem)
        return
    s.engines[op.engine].restarts = 0
    batch.version = event.rollout_version_first
    batch.tokens = event.tokens
    worker = s.workers[batch.worker]
    rec.fire_batch(
        batch,
        "generated",
        rollout_version_last=event.rollout_version_last,
        train_version=s.train_version,
        tokens=event.tokens,
    )
    rec.fire(worker.machine, "generated", batch_id=batch.id, engine=batch.engine)
    rec.issue(CommandKind.REWARD, worker.machine, worker=worker.index, batch_id=batch.id)


def _stamp_problem(rec: Recorder, event: Input, batch: Batch) -> str | None:
    """Why the engine's version stamp cannot be right, if so."""
    first, last = event.rollout_version_first, event.rollout_version_last
    if rec.state.config.external_rollouts:
        if first is not None and 0 <= first <= rec.state.train_version:
            return None
        return f"batch {batch.id} claims rollout version {first}, but train_version is {rec.state.train_version}"
    # In drain mode nothing is loaded while it generates, so the newest is the version it was started with.
    newest = rec.state.newest_on(rec.state.engines[batch.engine])
    assert batch.version is not None
    if first is not None and last is not None and batch.version <= first <= last <= newest:
        return None
    loaded = f"version {newest} was" if newest == batch.version else f"versions {batch.version} to {newest} were"
    return (
        f"engine-{batch.engine} reports rollout versions {first} to {last} for batch {batch.id}, "
        f"but {loaded} loaded: its weights are unknown"
    )


def _on_rewarded(rec: Recorder, admission: Admission, event: Input, op: Op) -> None:
    s = rec.state
    assert op.batch_id is not None
    if s.run.state is RunState.STOPPING:
        return
    batch = s.batches[op.batch_id]
    batch.degenerate = event.reason == "degenerate"
    s.parked.append(batch.id)
    worker = s.workers[batch.worker]
    assert worker.machine.state is RolloutState.REWARDING
    rec.fire_batch(batch, "rewarded", reason=event.reason, tokens=batch.tokens)
    rec.fire(worker.machine, "rewarded", batch_id=batch.id)


def _on_trained(rec: Recorder, admission: Admission, event: Input, op: Op) -> None:
    s = rec.state
    assert op.batch_id is not None
    batch = s.batches[op.batch_id]
    stepped = event.reason != "no_step"
    expected = s.train_version + int(stepped)
    if event.train_version != expected:
        message = f"trainer reports {event.train_version} optimiser steps after batch {batch.id}, expected {expected}"
        shutdown.fail_operation(rec, op, "wrong_version", message)
        return
    assert batch.version is not None
    s.training = None
    staleness = s.train_version - batch.version
    if stepped:
        s.train_version = expected
        s.no_step_run.clear()
        rec.fire_batch(batch, "trained", train_version=expected, staleness=staleness)
        rec.note(RecordKind.VERSION, s.trainer, trigger="step", train_version=expected, batch_id=batch.id)
    else:
        rec.fire_batch(batch, "drop", reason="no_step", train_version=s.train_version, staleness=staleness)
        consumption.consumed_without_step(rec, batch, "no_step", staleness)
    consumption.after_consumption(rec, admission, "trained", batch.id)
    consumption.check_no_step_run(rec)


def _on_exported(rec: Recorder, admission: Admission, event: Input, op: Op) -> None:
    s = rec.state
    assert op.publication is not None and op.version is not None and s.trainer.state is TrainerState.SYNCING
    s.exporting = None
    s.held.add(op.version)
    s.publications[op.publication] = op.version
    s.newest_publication = op.publication
    rec.note(RecordKind.SYNC, s.trainer, trigger="exported", train_version=op.version)
    if consumption.save_due(rec, admission):
        shutdown.begin_save(rec)
    else:
        rec.fire(s.trainer, "exported", train_version=op.version)


def _on_weights_loaded(rec: Recorder, admission: Admission, event: Input, op: Op) -> None:
    s = rec.state
    assert op.engine is not None and op.version is not None and op.publication is not None
    engine = s.engines[op.engine]
    if event.rollout_version_last != op.version:
        message = (
            f"engine-{engine.index} reports version {event.rollout_version_last} after loading version {op.version}: "
            f"its weights are unknown"
        )
        shutdown.fail_operation(rec, op, "wrong_version", message)
        return
    engine.version, engine.publication = op.version, op.publication
    rec.fire(engine.machine, "open", engine=engine.index, rollout_version_last=op.version)
    rec.note(
        RecordKind.VERSION,
        engine.machine,
        trigger="load",
        engine=engine.index,
        rollout_version_last=op.version,
        train_version=s.train_version,
    )


def _on_saved(rec: Recorder, admission: Admission, event: Input, op: Op) -> None:
    s = rec.state
    assert op.version is not None
    s.saved_version = op.version
    rec.note(RecordKind.CHECKPOINT, s.trainer, train_version=op.version, message=event.message)
    rec.fire(s.trainer, "saved", train_version=op.version)


_HANDLERS: dict[CommandKind, Handler] = {
    CommandKind.START_TRAINER: _on_started,
    CommandKind.START_ENGINE: _on_started,
    CommandKind.LOAD_PROMPTS: _on_prompts,
    CommandKind.GENERATE: _on_generated,
    CommandKind.REWARD: _on_rewarded,
    CommandKind.TRAIN: _on_trained,
    CommandKind.EXPORT: _on_exported,
    CommandKind.LOAD_WEIGHTS: _on_weights_loaded,
    CommandKind.SAVE: _on_saved,
}
