"""What the scheduler does on its own once an input is taken in: each rule makes at most one change and says so.

`Scheduler` repeats them in the order of `RULES` until none applies, so a decision depends on the state alone and not
on which input led to it.
"""

from __future__ import annotations

from collections.abc import Callable

from fsm_trainer.core import policy, shutdown
from fsm_trainer.core.admission import Admission
from fsm_trainer.core.events import CommandKind, RecordKind
from fsm_trainer.core.machines import EngineState, RolloutState, RunState, StateMachine, TrainerState
from fsm_trainer.core.recorder import Recorder
from fsm_trainer.core.state import Batch, Engine, Worker

Rule = Callable[[Recorder, Admission], bool]


def advance_run(rec: Recorder, admission: Admission) -> bool:
    """Move the run itself: running once engines serve, draining once done, stopping once all is accounted for."""
    s = rec.state
    if s.run.state is RunState.STARTING and all(e.machine.state is EngineState.OPEN for e in s.engines):
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
    if not _active(rec) or not s.parked or s.queue.full:
        return False
    batch = admission.next_to_enqueue()
    s.parked.remove(batch.id)
    s.queue.offer(batch.id)
    rec.fire_batch(batch, "enqueue")
    rec.note(RecordKind.QUEUE, "queue", trigger="put", batch_id=batch.id, queue_len=len(s.queue))
    _free_worker(rec, batch)
    return True


def _free_worker(rec: Recorder, batch: Batch) -> None:
    worker = rec.state.workers[batch.worker]
    rec.fire(worker.machine, "accepted", batch_id=batch.id)
    worker.batch = None


def _active(rec: Recorder) -> bool:
    return rec.state.run.state in (RunState.RUNNING, RunState.DRAINING)


def consume(rec: Recorder, admission: Admission) -> bool:
    """Hand the next batch to the trainer, check it, and train on it or drop it."""
    s = rec.state
    if not _active(rec) or s.trainer.state is not TrainerState.WAITING:
        return False
    batch = admission.candidate()
    if batch is None:
        return False
    _take(rec, batch)
    assert batch.version is not None
    staleness = policy.staleness_delta(s.train_version, batch.version)
    if policy.is_stale(s.train_version, batch.version, s.config.max_staleness):
        _meet_stale(rec, admission, batch, staleness)
    elif batch.degenerate:
        _drop(rec, admission, batch, "degenerate", staleness)
    else:
        _train(rec, batch, staleness)
    return True


def _take(rec: Recorder, batch: Batch) -> None:
    """Remove the batch from the queue, or straight from its parked worker when a full queue would lock it out."""
    s = rec.state
    rec.fire(s.trainer, "take", batch_id=batch.id)
    if batch.id in s.parked:
        s.parked.remove(batch.id)
        rec.note(RecordKind.QUEUE, "queue", trigger="take_parked", batch_id=batch.id, queue_len=len(s.queue))
        _free_worker(rec, batch)
    else:
        s.queue.remove(batch.id)
        rec.note(RecordKind.QUEUE, "queue", trigger="take", batch_id=batch.id, queue_len=len(s.queue))


def _train(rec: Recorder, batch: Batch, staleness: int) -> None:
    s = rec.state
    s.training = batch.id
    rec.fire_batch(batch, "train", train_version=s.train_version, staleness=staleness)
    rec.fire(s.trainer, "train", batch_id=batch.id, train_version=s.train_version, staleness=staleness)
    rec.issue(CommandKind.TRAIN, s.trainer, batch_id=batch.id, version=s.train_version)


def _meet_stale(rec: Recorder, admission: Admission, batch: Batch, staleness: int) -> None:
    s = rec.state
    if s.config.drop_stale:
        _drop(rec, admission, batch, "stale", staleness)
        return
    message = (
        f"batch {batch.id} is stale: staleness {staleness} > max_staleness {s.config.max_staleness} "
        f"(train_version {s.train_version}, rollout version {batch.version}) and stale batches are not dropped"
    )
    rec.fire_batch(batch, "fail", reason="stale", staleness=staleness)
    rec.fire(s.trainer, "fail", batch_id=batch.id, reason="stale", message=message)
    shutdown.fail(rec, message)


def _drop(rec: Recorder, admission: Admission, batch: Batch, reason: str, staleness: int) -> None:
    rec.fire_batch(batch, "drop", reason=reason, train_version=rec.state.train_version, staleness=staleness)
    consumed_without_step(rec, batch, reason, staleness)
    after_consumption(rec, admission, "drop", batch.id)
    check_no_step_run(rec)


def consumed_without_step(rec: Recorder, batch: Batch, reason: str, staleness: int | None) -> None:
    """Record a drop and count it towards the limit of batches without a step."""
    s = rec.state
    s.no_step_run.append(reason)
    rec.note(
        RecordKind.DROP,
        "trainer",
        batch_id=batch.id,
        engine=batch.engine,
        rollout_version_first=batch.version,
        train_version=s.train_version,
        staleness=staleness,
        reason=reason,
    )


def check_no_step_run(rec: Recorder) -> None:
    """Fail a run whose batches give no optimiser step any more."""
    s = rec.state
    if len(s.no_step_run) < s.config.max_no_step_batches:
        return
    counts = ", ".join(f"{s.no_step_run.count(r)} {r}" for r in sorted(set(s.no_step_run)))
    shutdown.fail(rec, f"{len(s.no_step_run)} batches in a row gave no optimiser step ({counts})")


def after_consumption(rec: Recorder, admission: Admission, plain: str, batch_id: int) -> None:
    """Count a consumed batch and move the trainer on: to a due sync, a due save, or (edge `plain`) to waiting."""
    s = rec.state
    s.consumed += 1
    if s.may_generate_more() and admission.sync_due() and not _alias(rec, admission):
        begin_export(rec, admission, batch_id)
    elif s.trainer.state is TrainerState.TRAINING and save_due(rec):
        shutdown.begin_save(rec)
    else:
        rec.fire(s.trainer, plain, batch_id=batch_id)


def save_due(rec: Recorder) -> bool:
    """Whether `save_interval` steps have been taken since the last checkpoint."""
    s = rec.state
    interval = s.config.save_interval
    return interval > 0 and s.train_version - s.saved_version >= interval


def _alias(rec: Recorder, admission: Admission) -> bool:
    """A publication of unchanged weights is an alias of the last one: nothing to export."""
    s = rec.state
    if s.publications.get(s.newest_publication) != s.train_version:
        return False
    s.newest_publication = admission.publication_id()
    s.publications[s.newest_publication] = s.train_version
    rec.note(RecordKind.SYNC, "trainer", trigger="alias", train_version=s.train_version)
    return True


def begin_export(rec: Recorder, admission: Admission, batch_id: int | None = None) -> None:
    """Start publishing the current weights."""
    s = rec.state
    s.exporting = admission.publication_id()
    rec.fire(s.trainer, "sync", batch_id=batch_id, train_version=s.train_version)
    rec.note(RecordKind.SYNC, "trainer", trigger="due", train_version=s.train_version)
    rec.issue(CommandKind.EXPORT, s.trainer, version=s.train_version, publication=s.exporting)


def first_publication(rec: Recorder, admission: Admission) -> bool:
    """Publish version 0 once the trainer is up."""
    s = rec.state
    ready = s.run.state is RunState.STARTING and s.trainer_up and s.trainer.state is TrainerState.WAITING
    if not ready or s.newest_publication >= 0:
        return False
    begin_export(rec, admission)
    return True


def sync_engines(rec: Recorder, admission: Admission) -> bool:
    """Close the gate of an engine for which a sync is due, and start its load once its own work has drained."""
    return any(_sync_engine(rec, admission, engine) for engine in rec.state.engines)


def _sync_engine(rec: Recorder, admission: Admission, engine: Engine) -> bool:
    s = rec.state
    if s.run.state is RunState.STOPPING or not s.may_generate_more():
        return False
    if engine.machine.state is EngineState.OPEN and admission.gate_closes(engine):
        rec.fire(engine.machine, "drain", engine=engine.index)
        return True
    draining = engine.machine.state is EngineState.DRAINING
    starting = engine.machine.state is EngineState.STARTING and engine.up
    if not (draining or starting) or engine.generating:
        return False
    target = admission.target(engine)
    if target is None:
        return False
    _begin_load(rec, engine, target)
    return True


def _begin_load(rec: Recorder, engine: Engine, publication: int) -> None:
    s = rec.state
    version = s.publications[publication]
    if version == engine.version:
        engine.publication = publication
        rec.fire(engine.machine, "reopen", engine=engine.index, rollout_version_last=version)
        return
    rec.fire(engine.machine, "load", engine=engine.index, rollout_version_last=version)
    rec.note(
        RecordKind.SYNC,
        engine.machine,
        trigger="announce",
        engine=engine.index,
        rollout_version_first=engine.version,
        rollout_version_last=version,
        train_version=s.train_version,
    )
    rec.issue(CommandKind.LOAD_WEIGHTS, engine.machine, engine=engine.index, version=version, publication=publication)


def start_generation(rec: Recorder, admission: Admission) -> bool:
    """Start the oldest ready batch whose engine is open with weights it may use."""
    s = rec.state
    if not _active(rec):
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
    if s.run.state is not RunState.RUNNING or s.exhausted or not s.steps_left():
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


def refresh(rec: Recorder, admission: Admission) -> bool:
    """Publish though no sync is due, when generation would stand still for ever otherwise."""
    s = rec.state
    if not _active(rec) or s.trainer.state is not TrainerState.WAITING or not s.may_generate_more():
        return False
    if s.sync_pending() or all(e.version == s.train_version for e in s.engines):
        return False
    if admission.candidate() is not None or not admission.refresh_needed():
        return False
    begin_export(rec, admission)
    return True


def release_snapshots(rec: Recorder, admission: Admission) -> bool:
    """Let go of snapshots that no engine can need any more."""
    s = rec.state
    oldest = admission.oldest_needed()
    for publication in [p for p in s.publications if p < oldest and p != s.newest_publication]:
        del s.publications[publication]
    loading = {op.version for op in s.ops.values() if op.kind is CommandKind.LOAD_WEIGHTS}
    unused = sorted(s.held - set(s.publications.values()) - loading)
    for version in unused:
        s.held.remove(version)
        rec.notify(CommandKind.RELEASE_SNAPSHOT, version=version)
    return bool(unused)


def wind_down(rec: Recorder, admission: Admission) -> bool:
    """Stop everything, one change at a time."""
    return shutdown.wind_down(rec)


RULES: tuple[Rule, ...] = (
    advance_run,
    first_publication,
    enqueue,
    consume,
    sync_engines,
    start_generation,
    admit,
    prefetch,
    refresh,
    release_snapshots,
    wind_down,
)
"""In the order they are tried; refresh is judged only when nothing can be admitted."""
