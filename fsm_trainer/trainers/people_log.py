"""The run's milestones as structlog lines for people: a view of the records, never a second truth."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.core.machines import RunState

_log = structlog.get_logger("fsm_train")


class PeopleLog:
    """Observer of the event loop: says when the run moves on, saves, drops or loses a batch, or restarts an engine."""

    def on_step(self, records: Sequence[Record]) -> Sequence[Record]:
        """Log what a person would want to know."""
        for r in records:
            if r.kind is RecordKind.TRANSITION and r.machine == "run" and r.dest in _MOVES:
                _log.info(f"run_{r.dest}", **_filled(reason=r.reason))
            elif r.kind is RecordKind.CHECKPOINT:
                _log.info("checkpoint_saved", **_filled(train_version=r.train_version, path=r.message))
            elif r.kind is RecordKind.DROP:
                fields = _filled(batch_id=r.batch_id, reason=r.reason, staleness=r.staleness)
                _log.info("batch_dropped", **fields)
            elif r.kind is RecordKind.TRANSITION and r.machine == "engine" and r.trigger == "restart":
                _log.warning("engine_restarting", **_filled(engine=r.engine, reason=r.reason, message=r.message))
            elif r.kind is RecordKind.TRANSITION and r.machine == "batch" and r.reason == "engine_lost":
                _log.warning("batch_lost", **_filled(batch_id=r.batch_id, reason=r.reason))
            elif r.kind is RecordKind.IGNORED:
                _log.warning("completion_ignored", **_filled(seq=r.cause_seq, trigger=r.trigger, reason=r.reason))
        return ()


_MOVES = {RunState.RUNNING.value, RunState.DRAINING.value, RunState.STOPPING.value}


def _filled(**fields: object) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}
