"""What the failure of one engine costs under `on_engine_failure="restart"`: its work in flight, and a start anew.

An engine is never mended: whatever befell it, a new one is built and loads the newest publication before it serves.
"""

from __future__ import annotations

from fsm_trainer.core.events import ENGINE_GONE, REFUSED_STEP, CommandKind
from fsm_trainer.core.machines import RunState
from fsm_trainer.core.recorder import Recorder
from fsm_trainer.core.state import NO_VERSION, Engine, Op, State


def engine_to_blame(state: State, op: Op, reason: str) -> Engine | None:
    """The engine that failed with an operation, if a new one may serve better; None if the run must fail.

    Not one that never served (a new one would fail alike), and not one whose logprobs or loss are wrong.
    """
    if state.config.on_engine_failure != "restart" or op.engine is None:
        return None
    engine = state.engines[op.engine]
    if engine.version == NO_VERSION or reason in REFUSED_STEP:
        return None
    if op.kind is CommandKind.GENERATE:
        gone = reason == "timeout" or reason in ENGINE_GONE
        return engine if gone and state.run.state is not RunState.STOPPING else None
    return engine


def recover(
    rec: Recorder, engine: Engine, reason: str, message: str, *, failed: Op | None = None, died: bool = False
) -> str | None:
    """Start a failed engine anew, or let it go if nothing is left to generate. Returns why the run must fail, if so.

    `failed` is the operation that failed, not in flight any more. What the engine generates is lost, and nothing else.
    """
    s = rec.state
    needed = s.run.state is not RunState.STOPPING and s.may_generate_more()
    if needed and engine.restarts >= s.config.max_engine_restarts:
        times = f"{engine.restarts} time{'s' * (engine.restarts > 1)}"
        return f"{engine.machine.entity} was restarted {times} without finishing a generation, then: {message}"
    if s.run.state is not RunState.STOPPING:
        _lose_work(rec, engine, failed, died=died)
    if not needed:
        rec.fire(engine.machine, "break", engine=engine.index, reason=reason, message=message)
        return None
    engine.restarts += 1
    engine.up, engine.publication = False, NO_VERSION  # its version stays, as a lower bound of what it will serve
    rec.fire(engine.machine, "restart", engine=engine.index, reason=reason, message=message)
    start(rec, engine)
    return None


def start(rec: Recorder, engine: Engine) -> None:
    """Ask for the engine to be built and started."""
    op = rec.issue(CommandKind.START_ENGINE, engine.machine, engine=engine.index)
    engine.start_op = op.seq


def abort(rec: Recorder, op: Op) -> None:
    """Tell an operation to end early."""
    op.aborted = True
    rec.notify(CommandKind.ABORT, target=op.seq)


def withdraw(rec: Recorder, op: Op, *, told: bool = True) -> None:
    """Stop waiting for an operation, which is told so unless nobody is there to be told; it may complete in vain."""
    s = rec.state
    del s.ops[op.seq]
    s.abandoned.add(op.seq)
    if told and not op.aborted:
        abort(rec, op)


def _lose_work(rec: Recorder, engine: Engine, failed: Op | None, *, died: bool) -> None:
    lost = [op for op in rec.state.ops.values() if op.engine == engine.index]
    for op in lost:
        withdraw(rec, op, told=not died)
    for op in (*lost, *([] if failed is None else [failed])):
        if op.kind is CommandKind.GENERATE:
            _lose_batch(rec, engine, op)


def _lose_batch(rec: Recorder, engine: Engine, op: Op) -> None:
    assert op.batch_id is not None
    batch = rec.state.batches[op.batch_id]
    worker = rec.state.workers[batch.worker]
    engine.generating.discard(batch.id)
    rec.fire_batch(batch, "fail", reason="engine_lost")
    rec.fire(worker.machine, "lost", batch_id=batch.id, engine=engine.index)
    worker.batch = None
