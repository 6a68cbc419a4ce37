"""What the scheduler does on its own once an input is taken in: each rule makes at most one change and says so.

`Scheduler` repeats them in the order of `RULES` until none applies, so a decision depends on the state alone and not
on which input led to it.
"""

from __future__ import annotations

from collections.abc import Callable

from fsm_trainer.core import consumption, publishing, shutdown
from fsm_trainer.core.admission import Admission
from fsm_trainer.core.events import CommandKind, RecordKind
from fsm_trainer.core.machines import EngineState, RolloutState, RunState, StateMachine, TrainerState
from fsm_trainer.core.recorder import Recorder
from fsm_trainer.core.state import Batch, Engine, Worker

Rule = Callable[[Recorder, Admission], bool]
_UP_OR_LET_GO = (EngineState.OPEN, EngineState.BROKEN)
"""One that failed is let go, and no failure of the run, only if there is nothing to generate."""


def advance_run(rec: Recorder, admission: Admission) -> bool:
    """Move the run itself: running once engines serve, draining once done, stopping once all is accounted for."""
    s = rec.state
    if s.run.state is RunState.STARTING and all(e.machine.state in _UP_OR_LET_GO for e in s.engines):
        s.running_since_ns = rec.t_ns
        rec.fire(s.run, "run")
        return True
    if s.run.state is RunState.RUNNING and (s.max_steps_reached or s.exhausted):
        shutdown.drain(rec, "max_steps reached" if s.max_steps_reached else "prompts exhausted")
        return True
    if s.run.state is RunState.DRAINING and not s.batches and s.trainer.state is TrainerState.WAITING:
        if shutdown.save_needed(rec):
            shutdown.begin_save(rec)
        else:
            shutdown.stop_run(rec, s.drain_reason, abort=False)
        return True
    return False


def enqueue(rec: Recorder, admission: Admission) -> bool:
    """Give a free slot of the train queue to a parked batch."""
    s = rec.state
    if not s.active or not s.parked or s.queue.full:
        return False
    batch = admission.next_to_enqueue()
    s.parked.remove(batch.id)
    s.queue.offer(batch.id)
    rec.fire_batch(batch, "enqueue")
    rec.note(RecordKind.QUEUE, "queue", trigger="put", batch_id=batch.id, queue_len=len(s.queue))
    consumption.free_worker(rec, batch)
    return True


def start_generation(rec: Recorder, admission: Admission) -> bool:
    """Start the oldest ready batch whose engine is open with weights it may use."""
    s = rec.state
    if not s.active:
        return False
    for batch in s.unstarted():
        worker, engine = s.workers[batch.worker], s.engines[batch.engine]
        ready = worker.machine.state is RolloutState.READY and engine.machine.state is EngineState.OPEN
        if ready and admission.may_start(batch):
            _start(rec, worker, engine, batch)
            return True
    return False


def _start(rec: Recorder, worker: Worker, engine: Engine, batch: Batch) -> None:
    batch.version = engine.version
    engine.generating.add(batch.id)
    rec.fire(
        worker.machine,
        "start",
        batch_id=batch.id,
        engine=engine.index,
        rollout_version_first=engine.version,
        train_version=rec.state.train_version,
    )
    rec.issue(
        CommandKind.GENERATE,
        worker.machine,
        worker=worker.index,
        engine=engine.index,
        batch_id=batch.id,
        version=engine.version,
    )


def admit(rec: Recorder, admission: Admission) -> bool:
    """Give the next batch id to an idle worker, if the admission allows."""
    s = rec.state
    if s.run.state is not RunState.RUNNING or s.exhausted:
        return False
    if all(w.machine.state is not RolloutState.IDLE for w in s.workers) or not s.steps_left():
        return False
    worker = next((w for w in s.idle_workers() if admission.may_admit(s.engines[w.engine])), None)
    if worker is None:
        return False
    batch = Batch(s.next_id, worker.index, worker.engine, StateMachine("batch", f"batch-{s.next_id}"))
    batch.machine.since_ns = rec.t_ns
    s.batches[batch.id] = batch
    s.counts["admitted"] += 1
    s.next_id += 1
    worker.batch = batch.id
    rec.fire(worker.machine, "admit", batch_id=batch.id, engine=batch.engine, train_version=s.train_version)
    if batch.id not in s.prompts:
        load_prompts(rec, batch.id)
    elif s.prompts[batch.id]:
        del s.prompts[batch.id]
        rec.fire(worker.machine, "loaded", batch_id=batch.id)
    return True


def load_prompts(rec: Recorder, batch_id: int) -> None:
    """Ask the loader for the prompts of a batch id; ids are bound to prompts in order."""
    rec.state.prompts[batch_id] = False
    rec.issue(CommandKind.LOAD_PROMPTS, None, batch_id=batch_id)


def prefetch(rec: Recorder, admission: Admission) -> bool:
    """Keep up to `prefetch` prompt batches loaded, or loading, ahead of admission."""
    s = rec.state
    if s.run.state not in (RunState.STARTING, RunState.RUNNING) or not s.trainer_up:
        return False
    ahead = s.next_id
    while ahead in s.prompts:
        ahead += 1
    limit = s.next_id + s.config.prefetch
    if s.source_end is not None:
        limit = min(limit, s.source_end)
    if ahead >= limit or not s.steps_left():
        return False
    load_prompts(rec, ahead)
    return True


def wind_down(rec: Recorder, admission: Admission) -> bool:
    """Stop everything, one change at a time."""
    return shutdown.wind_down(rec)


RULES: tuple[Rule, ...] = (
    advance_run,
    publishing.first_publication,
    enqueue,
    consumption.consume,
    publishing.sync_engines,
    start_generation,
    admit,
    prefetch,
    publishing.refresh,
    publishing.release_snapshots,
    wind_down,
)
"""In the order they are tried; refresh is judged only when nothing can be admitted."""
