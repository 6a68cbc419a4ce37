"""The trainer's side: which batch is taken, whether it is trained on or dropped, and what follows a consumption."""

from __future__ import annotations

from fsm_trainer.core import policy, publishing, shutdown
from fsm_trainer.core.admission import Admission
from fsm_trainer.core.events import CommandKind, RecordKind
from fsm_trainer.core.machines import RunState, TrainerState
from fsm_trainer.core.recorder import Recorder
from fsm_trainer.core.state import Batch


def consume(rec: Recorder, admission: Admission) -> bool:
    """Hand the next batch to the trainer, check it, and train on it or drop it."""
    s = rec.state
    if not rec.state.active or s.trainer.state is not TrainerState.WAITING:
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
        free_worker(rec, batch)
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
    message = f"{len(s.no_step_run)} batches in a row gave no optimiser step ({counts})"
    if "degenerate" in s.no_step_run:
        message += "; degenerate: within each prompt group all rewards were equal, so there is nothing to prefer"
    shutdown.fail(rec, message)


def after_consumption(rec: Recorder, admission: Admission, plain: str, batch_id: int) -> None:
    """Count a consumed batch and move the trainer on: to a due sync, a due save, or (edge `plain`) to waiting."""
    s = rec.state
    s.consumed += 1
    if s.may_generate_more() and admission.sync_due() and not publishing.alias(rec, admission):
        publishing.begin_export(rec, admission, batch_id)
    elif save_due(rec, admission):
        shutdown.begin_save(rec)
    else:
        rec.fire(s.trainer, plain, batch_id=batch_id)


def save_due(rec: Recorder, admission: Admission) -> bool:
    """Whether a checkpoint is due now; a stopping run saves only at its end."""
    return rec.state.run.state is not RunState.STOPPING and admission.save_due()


def free_worker(rec: Recorder, batch: Batch) -> None:
    """The batch left its worker, which is free for the next one."""
    worker = rec.state.workers[batch.worker]
    rec.fire(worker.machine, "accepted", batch_id=batch.id)
    worker.batch = None
