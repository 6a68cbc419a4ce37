"""The account that a `Monitor` would have kept up to a state, rebuilt from that state.

Only so can a search hold every step against the monitor: a state is reached by many histories, and the monitor's
account of all of them is the same as far as it matters for what comes next.
"""

from __future__ import annotations

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import CommandKind, Record, RecordKind
from fsm_trainer.core.monitor import Monitor
from fsm_trainer.core.scheduler import Scheduler
from fsm_trainer.core.state import State

_ACCOUNT = {
    *("config", "seq", "t_ns", "states", "commands", "queue", "train_version", "rollout_versions", "generating"),
    *(
        "announced",
        "batch_version",
        "started_with",
        "consumed",
        "ended",
        "batches",
        "finished",
        "prompts_loaded",
        "loading",
    ),
    *(
        "steps_reported",
        "given_up",
        "started_by",
        "restarts",
        "anew",
        "replaced",
        "unmatched",
        "matched",
        "over",
        "_checks",
    ),
}


def check_account() -> None:
    """Refuse to search when the monitor keeps something that this module does not rebuild."""
    held = set(vars(Monitor(SchedulerConfig())))
    assert held == _ACCOUNT, f"explore_monitor does not know {held ^ _ACCOUNT}"


def monitor_of(scheduler: Scheduler) -> Monitor:
    """A monitor that has seen a run up to this state; batches that are closed have ended once."""
    s = scheduler.state
    monitor = Monitor(s.config)
    monitor.seq = scheduler._recorder.seq - 1
    _rebuild_states(monitor, s)
    _rebuild_operations(monitor, s)
    monitor.queue = list(s.queue.items())
    monitor.finished = {*s.queue.items(), *s.parked}
    monitor.train_version = monitor.steps_reported = s.train_version
    monitor.restarts = {e.index: e.restarts for e in s.engines}
    monitor.anew = {e.index for e in s.engines if e.version >= 0 and e.publication < 0}
    monitor.rollout_versions = {e.index: e.version for e in s.engines if e.version >= 0}
    monitor.batch_version = {b.id: b.version for b in s.batches.values() if b.version is not None}
    monitor.consumed = list(range(s.consumed + s.in_training))
    monitor.prompts_loaded = {*range(s.next_id), *s.prompts}
    return monitor


def _rebuild_states(monitor: Monitor, s: State) -> None:
    machines = [s.run, s.trainer, *(w.machine for w in s.workers), *(e.machine for e in s.engines)]
    monitor.states = {m.entity: m.state.value for m in (*machines, *(b.machine for b in s.batches.values()))}
    monitor.batches = s.next_id
    for closed in (f"batch-{i}" for i in range(s.config.first_batch, s.next_id) if i not in s.batches):
        monitor.states[closed] = monitor.ended[closed] = "trained"


def _rebuild_operations(monitor: Monitor, s: State) -> None:
    for op in s.ops.values():
        row = Record(op.seq, 0, RecordKind.COMMAND, engine=op.engine, batch_id=op.batch_id)
        monitor.commands[op.seq] = (op.kind, row)
        if op.aborted:
            monitor.given_up.add(op.seq)
        if op.kind is CommandKind.GENERATE:
            assert op.engine is not None and op.batch_id is not None and op.version is not None
            monitor.generating.setdefault(op.engine, set()).add(op.batch_id)
            monitor.started_with[op.batch_id] = op.version
        if op.kind is CommandKind.LOAD_WEIGHTS and op.engine is not None and op.version is not None:
            monitor.loading[op.engine] = op.version
