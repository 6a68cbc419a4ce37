"""How a run ends: stop requests, failures, missed deadlines and the wind-down that accounts for everything."""

from __future__ import annotations

from fsm_trainer.core import restarting, waits
from fsm_trainer.core.config import SECOND_NS
from fsm_trainer.core.events import REFUSED_STEP, CommandKind, Input, RecordKind
from fsm_trainer.core.machines import BatchState, RolloutState, RunState, StateMachine, TrainerState
from fsm_trainer.core.recorder import Recorder, limit_s
from fsm_trainer.core.state import Batch, Op

_ABORTABLE = frozenset(
    {
        CommandKind.START_ENGINE,
        CommandKind.LOAD_PROMPTS,
        CommandKind.GENERATE,
        CommandKind.REWARD,
        CommandKind.LOAD_WEIGHTS,
    }
)
"""Operations whose result a failed or interrupted run cannot use. A step, an export or a save is always awaited."""
_RESTARTS = frozenset({CommandKind.START_ENGINE})
"""The same of a run that has reached its end: an engine that is being started anew."""


def drain(rec: Recorder, reason: str) -> None:
    """Admit nothing more; what is admitted runs to its end."""
    rec.state.drain_reason = reason
    rec.fire(rec.state.run, "drain", reason=reason)
    _close_source(rec)


def fail(rec: Recorder, message: str) -> None:
    """Keep the first error and stop the run."""
    s = rec.state
    if s.error is None:
        s.error, s.outcome = message, "failed"
    if s.run.state not in (RunState.STOPPING, RunState.STOPPED, RunState.FAILED):
        stop_run(rec, "failed", abort=True)


def stop_run(rec: Recorder, reason: str, *, abort: bool) -> None:
    """Start nothing new; cancel what waits, await (or abort) what is in flight."""
    s = rec.state
    s.drain_reason = s.drain_reason or reason
    rec.fire(s.run, "stop", reason=reason)
    s.stop_deadline_ns = _after(rec, s.config.deadlines.shutdown_s)
    _close_source(rec)
    s.queue.close()
    useless = _ABORTABLE if abort else _RESTARTS
    for op in list(s.ops.values()):
        if op.kind in useless:
            restarting.abort(rec, op)


def _after(rec: Recorder, seconds: float) -> int | None:
    return rec.t_ns + int(seconds * SECOND_NS) if seconds else None


def _close_source(rec: Recorder) -> None:
    if not rec.state.source_closed:
        rec.state.source_closed = True
        rec.notify(CommandKind.CLOSE_SOURCE)


def on_stop(rec: Recorder, event: Input) -> None:
    """First request: drain. Second: stop at once. Further ones change nothing."""
    s = rec.state
    s.stops += 1
    if s.run.state is RunState.RUNNING:
        s.outcome = "interrupted"
        drain(rec, event.reason or "stop")
    elif s.run.state is RunState.STARTING or (s.run.state is RunState.DRAINING and s.stops > 1):
        s.outcome = "interrupted"
        stop_run(rec, event.reason or "stop", abort=True)
        s.stop_deadline_ns = _after(rec, s.config.deadlines.interrupt_s)
    elif s.run.state is RunState.STOPPING and s.stops > 1:
        s.stop_deadline_ns = _after(rec, s.config.deadlines.interrupt_s)


def on_tick(rec: Recorder) -> None:
    """Fail the run for every operation or wait that is past its deadline, and give up on a shutdown that is."""
    s = rec.state
    for op in [op for op in s.ops.values() if op.deadline_ns is not None and op.deadline_ns <= rec.t_ns]:
        if op.seq in s.ops:  # otherwise it went with its engine, which another one's lateness has ended
            message = f"{_who(op)} took longer than {limit_s(s.config.deadlines, op.kind):g} s"
            restarting.withdraw(rec, op)
            fail_operation(rec, op, "timeout", message)
    if s.active:
        late = [m for m, deadline in waits.wait_deadlines(s) if deadline <= rec.t_ns]
        if late:
            _fail_wait(rec, late[0])
    if s.stop_deadline_ns is not None and s.stop_deadline_ns <= rec.t_ns:
        _give_up(rec)


def _fail_wait(rec: Recorder, machine: StateMachine) -> None:
    s = rec.state
    waited = (rec.t_ns - waits.waiting_since(s, machine)) / SECOND_NS
    message = (
        f"{machine.entity} waited {waited:.1f} s in state {machine.state.value} "
        f"(queue timeout {s.config.deadlines.queue_s:g} s): {waits.culprit(s, machine, rec.t_ns)}"
    )
    batch = next((s.batches[w.batch] for w in s.workers if w.machine is machine and w.batch is not None), None)
    rec.fire(machine, "fail", reason="timeout", message=message)
    if batch is not None:
        s.parked.remove(batch.id)
        rec.fire_batch(batch, "fail", reason="timeout")
    fail(rec, message)


def _who(op: Op) -> str:
    owner = "loader" if op.owner is None else f"{op.owner.entity} in state {op.owner.state.value}"
    batch = "" if op.batch_id is None else f" of batch {op.batch_id}"
    return f"{owner}: {op.kind.value}{batch}"


def _give_up(rec: Recorder) -> None:
    s = rec.state
    s.stop_deadline_ns = None
    late = list(s.ops.values())
    message = f"gave up waiting at shutdown for {', '.join(_who(op) for op in late)}"
    for op in late:
        restarting.withdraw(rec, op)
        _fail_owner(rec, op, "timeout", message)
    if s.outcome != "interrupted":
        fail(rec, message)


def fail_operation(rec: Recorder, op: Op, reason: str, message: str) -> None:
    """What an operation, not in flight any more, that failed, was late or reported what cannot be means for the run.

    It fails, unless that is the failure of an engine which may be restarted.
    """
    engine = restarting.engine_to_blame(rec.state, op, reason)
    if engine is not None:
        in_vain = restarting.recover(rec, engine, reason, message, failed=op)
        if in_vain is None:
            return
        message = in_vain
    _fail_owner(rec, op, reason, message)
    fail(rec, message)


def _fail_owner(rec: Recorder, op: Op, reason: str, message: str) -> None:
    """Put the machine of a failed operation, and its batch, into their failed states."""
    s = rec.state
    batch = s.batches.get(op.batch_id) if op.batch_id is not None else None
    engine = s.engines[op.engine] if op.engine is not None else None
    if batch is not None and op.kind is CommandKind.GENERATE:
        s.engines[batch.engine].generating.discard(batch.id)
    machine = op.owner
    if machine is None and batch is not None:
        machine = s.workers[batch.worker].machine
    if machine is not None and not machine.ended:
        trigger = "break" if engine is not None and machine is engine.machine else "fail"
        if op.kind is CommandKind.TRAIN and reason in REFUSED_STEP:
            # The weights are whole, so the trainer stays fit to save the last step.
            trigger = "refuse"
        rec.fire(machine, trigger, batch_id=op.batch_id, engine=op.engine, reason=reason, message=message)
    if batch is not None:
        rec.fire_batch(batch, "fail", reason=reason)
    if op.kind is CommandKind.EXPORT:
        s.exporting = None
    if batch is not None and s.training == batch.id:
        s.training = None


def wind_down(rec: Recorder) -> bool:
    """One step of the stopping run; True if it changed something."""
    s = rec.state
    if s.run.state is not RunState.STOPPING:
        return False
    return _cancel_waiting(rec) or _stop_trainer(rec) or _stop_engines(rec) or _finish(rec)


def _cancel_waiting(rec: Recorder) -> bool:
    """Cancel every batch that no operation works on, and stop its worker."""
    s = rec.state
    s.parked.clear()
    s.queue.drain()
    worked_on = {op.batch_id for op in s.ops.values() if op.kind in (CommandKind.GENERATE, CommandKind.REWARD)}
    idle: list[Batch] = [b for b in s.batches.values() if b.id != s.training and b.id not in worked_on]
    for batch in idle:
        rec.fire_batch(batch, "cancel", reason="stopping")
    changed = bool(idle)
    for worker in s.workers:
        if not worker.machine.ended and not s.busy(worker.machine):
            rec.fire(worker.machine, "stop")
            worker.batch = None
            changed = True
    return changed


def _stop_trainer(rec: Recorder) -> bool:
    """Stop the trainer once idle; what it has learnt is saved first unless the stop is to be at once."""
    s = rec.state
    if s.trainer.ended or s.busy(s.trainer):
        return False
    if s.trainer.state is TrainerState.WAITING and save_needed(rec) and s.outcome != "interrupted":
        begin_save(rec)
    else:
        rec.fire(s.trainer, "stop")
    return True


def _stop_engines(rec: Recorder) -> bool:
    s = rec.state
    idle = [e for e in s.engines if not e.machine.ended and not s.busy(e.machine) and not e.generating]
    for engine in idle:
        rec.fire(engine.machine, "stop")
    return bool(idle)


def _finish(rec: Recorder) -> bool:
    s = rec.state
    machines = [s.trainer, *(w.machine for w in s.workers), *(e.machine for e in s.engines)]
    if s.ops or not all(m.ended for m in machines):
        return False
    for version in sorted(s.held):
        rec.notify(CommandKind.RELEASE_SNAPSHOT, version=version)
    s.held.clear()
    s.outcome = s.outcome or "completed"
    rec.fire(s.run, "fail" if s.error is not None else "finish")
    message = s.error or s.drain_reason
    rec.note(RecordKind.RUN_END, s.run, train_version=s.train_version, reason=s.outcome, message=message)
    return True


def save_needed(rec: Recorder) -> bool:
    """Whether the last step is not saved yet."""
    return rec.state.config.save_last and rec.state.train_version > rec.state.saved_version


def begin_save(rec: Recorder) -> None:
    """Start writing a checkpoint of the current version."""
    s = rec.state
    rec.fire(s.trainer, "save", train_version=s.train_version)
    rec.issue(CommandKind.SAVE, s.trainer, version=s.train_version)


def batch_cancelled_by_exhaustion(rec: Recorder, batch: Batch) -> None:
    """The prompt source has no such batch: its worker is free again."""
    worker = rec.state.workers[batch.worker]
    assert worker.machine.state is RolloutState.LOADING and batch.machine.state is BatchState.ADMITTED
    rec.fire_batch(batch, "cancel", reason="exhausted")
    rec.fire(worker.machine, "exhausted", batch_id=batch.id)
    worker.batch = None
