"""A scheduler that is watched: every invariant after every input, and what the end must show."""

from __future__ import annotations

from collections import deque

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import NOTICES, Command, Input, Record
from fsm_trainer.core.invariants import check_state, hold
from fsm_trainer.core.monitor import Monitor
from fsm_trainer.core.scheduler import Scheduler

LAST_RECORDS = 20
"""Records kept for the report of a failure."""


class CheckedScheduler(Scheduler):
    """The scheduler itself, with a monitor over its records. Raises InvariantViolation."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Watch a run of this configuration from its first input on."""
        super().__init__(config)
        self.monitor = Monitor(config)
        self.last_records: deque[Record] = deque(maxlen=LAST_RECORDS)

    def step(self, event: Input) -> tuple[list[Record], list[Command]]:
        """Decide, then check the records, the state and that every command has its record."""
        try:
            records, commands = super().step(event)
        finally:
            # Of a step that breaks, as far as it got.
            self.last_records.extend(self._recorder.records)
        self.monitor.see_all(records)
        if commands:
            rows = {record.seq for record in records}
            hold(all(command.op in rows for command in commands), "records precede their commands", commands)
        if self.finished:
            self.monitor.finish()
            hold(all(command.kind in NOTICES for command in commands), "nothing starts at the end", commands)
        else:
            check_state(self.state)
        return records, commands

    def annotate(self, record: Record) -> Record:
        """Number a metric row, which the monitor sees too."""
        row = super().annotate(record)
        self.monitor.see(row)
        return row


def input_bound(config: SchedulerConfig, *, batches: int | None, unusable: int, extra: int) -> int | None:
    """Inputs within which a run without deadlines must end; None if it may go on for ever.

    A batch takes at most one load, generation, reward, step, export, checkpoint and a load of weights on each engine.
    In paced and lockstep each batch is consumed; in greedy a step can make stale at most what is in the queue and on
    the workers. `unusable` batches give no step; `extra` inputs come unasked.
    """
    limits = [limit for limit in (config.max_steps, batches) if limit is not None]
    if not limits:
        return None
    admitted = min(limits) + unusable
    if config.admission == "greedy":
        admitted = (admitted + 1) * (1 + config.queue_size + config.workers)
    if batches is not None:
        admitted = min(admitted, batches + config.workers)
    per_batch = 6 + config.engines
    start = 4 + 3 * config.engines
    return start + per_batch * (admitted + 1) + config.prefetch + config.workers + extra
