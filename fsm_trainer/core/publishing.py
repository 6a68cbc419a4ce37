"""Weight sync: when a version is published, when an engine's gate closes, what it loads, and what is released."""

from __future__ import annotations

from fsm_trainer.core.admission import Admission
from fsm_trainer.core.events import CommandKind, RecordKind
from fsm_trainer.core.machines import EngineState, RunState, TrainerState
from fsm_trainer.core.recorder import Recorder
from fsm_trainer.core.state import Engine

_SYNCING = (EngineState.OPEN, EngineState.DRAINING, EngineState.STARTING)
"""States in which an engine may close its gate or begin a load."""


def alias(rec: Recorder, admission: Admission) -> bool:
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
    """Close the gate of an engine for which a sync is due, and start its load once its own work has drained.

    In-flight sync closes it for the load alone, which begins as soon as there is something newer to load.
    """
    if rec.state.run.state is RunState.STOPPING:
        return False
    return any(_sync_engine(rec, admission, engine) for engine in rec.state.engines if engine.machine.state in _SYNCING)


def _sync_engine(rec: Recorder, admission: Admission, engine: Engine) -> bool:
    inflight = rec.state.config.inflight
    if engine.machine.state is EngineState.OPEN and not inflight:
        return _close_gate(rec, admission, engine)
    starting = engine.machine.state is EngineState.STARTING
    if (starting and not engine.up) or (engine.generating and not inflight):
        return False
    target = admission.target(engine)
    if target is None or not _wanted(rec):
        return False
    _begin_load(rec, engine, target)
    return True


def _close_gate(rec: Recorder, admission: Admission, engine: Engine) -> bool:
    if not admission.gate_closes(engine) or not _wanted(rec):
        return False
    rec.fire(engine.machine, "drain", engine=engine.index)
    return True


def _wanted(rec: Recorder) -> bool:
    """Whether new weights can still serve a generation."""
    return not rec.state.active or rec.state.may_generate_more()


def _begin_load(rec: Recorder, engine: Engine, publication: int) -> None:
    s = rec.state
    version = s.publications[publication]
    if version == engine.version and engine.machine.state is not EngineState.STARTING:
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


def refresh(rec: Recorder, admission: Admission) -> bool:
    """Publish though no sync is due, when generation would stand still for ever otherwise."""
    s = rec.state
    if not s.active or s.trainer.state is not TrainerState.WAITING or s.sync_pending():
        return False
    if all(e.version == s.train_version for e in s.engines) or not s.may_generate_more():
        return False
    if admission.candidate() is not None or not admission.refresh_needed():
        return False
    begin_export(rec, admission)
    return True


def release_snapshots(rec: Recorder, admission: Admission) -> bool:
    """Let go of snapshots that no engine can need any more."""
    s = rec.state
    if len(s.publications) <= 1 and len(s.held) <= 1:
        return False
    oldest = admission.oldest_needed()
    for publication in [p for p in s.publications if p < oldest and p != s.newest_publication]:
        del s.publications[publication]
    loading = {op.version for op in s.ops.values() if op.kind is CommandKind.LOAD_WEIGHTS}
    unused = sorted(s.held - set(s.publications.values()) - loading)
    for version in unused:
        s.held.remove(version)
        rec.notify(CommandKind.RELEASE_SNAPSHOT, version=version)
    return bool(unused)
